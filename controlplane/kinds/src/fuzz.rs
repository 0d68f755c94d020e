//! Entry points of the fuzz targets in `integration/fuzz`, and the test that replays their corpora with a stable
//! compiler. Each accepts any bytes. It fails by a panic, or by exceeding the fuzzer's limits on time and memory.

use serde_json::Value;

use crate::{
    patch, protobuf, schema,
    selector::{FieldSelector, LabelSelector},
};

/// Patches of all three types. The input is two JSON documents, an object and a patch, with a line end between them.
pub fn patch(data: &[u8]) {
    let Some(line) = data.iter().position(|byte| *byte == b'\n') else { return };
    let (object, rest) = data.split_at(line);
    let [Ok(object), Ok(patch)] = [object, rest].map(serde_json::from_slice::<Value>) else { return };
    if !object.is_object() {
        return;
    }
    let pod = "io.k8s.api.core.v1.Pod";
    let patched =
        [patch::json(&object, &patch), patch::merge(&object, &patch), patch::strategic(pod, &object, &patch)];
    // The result must be readable after it was stored.
    for patched in patched.into_iter().flatten() {
        assert!(serde_json::from_str::<Value>(&patched.to_string()).is_ok(), "a patch made {patched}");
    }
}

/// Bodies of `application/vnd.kubernetes.protobuf`.
pub fn protobuf(data: &[u8]) {
    if let Ok(object) = protobuf::decode(data) {
        assert!(object.is_object(), "a body became {object}");
    }
}

/// JSON bodies, with the check against a schema.
pub fn json(data: &[u8]) {
    let _refused = schema::parse_json(data);
}

/// Label and field selectors of query strings.
pub fn selector(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let _refused = LabelSelector::parse(text);
    if let Some(pods) = crate::kind::by_resource("", "v1", "pods") {
        let _refused = FieldSelector::parse(pods, text);
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    #[test]
    fn the_corpora_are_replayed() {
        let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration/fuzz/corpus");
        type Target = fn(&[u8]);
        let targets: [(&str, Target); 4] = [
            ("patch", super::patch),
            ("protobuf", super::protobuf),
            ("json", super::json),
            ("selector", super::selector),
        ];
        for (name, target) in targets {
            let mut inputs = 0;
            for entry in std::fs::read_dir(corpora.join(name)).unwrap() {
                target(&std::fs::read(entry.unwrap().path()).unwrap());
                inputs += 1;
            }
            assert!(inputs > 0, "the corpus of {name} is empty");
        }
    }
}
