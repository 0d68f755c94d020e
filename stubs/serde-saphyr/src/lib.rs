//! The part of the API of `serde-saphyr` that kube-client uses, as calls of `serde_yaml_ng`.
//!
//! kube-client reads kubeconfig files and the output of credential plugins with it. The rest of the program reads YAML
//! with `serde_yaml_ng`, so the binary has one YAML library. kube-client has no feature that leaves the crate out.

use serde::Deserialize;
pub use serde_yaml_ng::Error;

/// The documents of a text. Empty documents and `null` are skipped.
///
/// # Errors
/// When the text is not YAML, or a document has another type.
pub fn from_multiple<'de, T: Deserialize<'de>>(text: &'de str) -> Result<Vec<T>, Error> {
    let mut found = Vec::new();
    for document in serde_yaml_ng::Deserializer::from_str(text) {
        found.extend(Option::<T>::deserialize(document)?);
    }
    Ok(found)
}

/// The only document of a text.
///
/// # Errors
/// When the text is not YAML of this type, or has further documents.
pub fn from_slice<'de, T: Deserialize<'de>>(text: &'de [u8]) -> Result<T, Error> {
    serde_yaml_ng::from_slice(text)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    type Texts = BTreeMap<String, String>;

    #[test]
    fn empty_documents_are_skipped() {
        for text in ["", "\n", "# a comment\n", "---\n", "---\n---\nnull\n---\n~\n"] {
            assert!(from_multiple::<Texts>(text).expect(text).is_empty(), "{text:?}");
        }
        let found: Vec<Texts> = from_multiple("a: b\n---\n---\nc: d\n").expect("documents");
        assert_eq!(found, [Texts::from([("a".into(), "b".into())]), Texts::from([("c".into(), "d".into())])]);
    }

    #[test]
    fn json_is_read_as_yaml() {
        let found: Texts = from_slice(br#"{"a": "b"}"#).expect("JSON");
        assert_eq!(found["a"], "b");
    }

    #[test]
    fn an_error_has_the_line_and_not_its_text() {
        let error = from_multiple::<Texts>("a: b\ntoken: [secret\n").expect_err("an open list").to_string();
        assert!(error.contains("line ") && !error.contains("secret"), "{error}");
    }
}
