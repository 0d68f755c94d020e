//! The part of a registry's response that goes into an error, and thereby into events of pods.
//!
//! The image's name determines the registry, and the registry determines its token service and redirects.
//! Each of them may be a service that only this machine can reach. So the only text that is passed on is an error
//! document of the distribution specification from the registry itself (compare CVE-2020-8555 and CVE-2020-15157).

use reqwest::{Response, Url};

/// Maximum bytes of a registry's reason in an error.
const DETAIL_MAX: usize = 300;
/// Maximum bytes of a foreign URL in an error.
const URL_MAX: usize = 256;

/// Error codes of the distribution specification, and other codes that registries use.
const CODES: [&str; 19] = [
    "BLOB_UNKNOWN",
    "BLOB_UPLOAD_INVALID",
    "BLOB_UPLOAD_UNKNOWN",
    "DENIED",
    "DIGEST_INVALID",
    "MANIFEST_BLOB_UNKNOWN",
    "MANIFEST_INVALID",
    "MANIFEST_UNKNOWN",
    "MANIFEST_UNVERIFIED",
    "NAME_INVALID",
    "NAME_UNKNOWN",
    "RANGE_INVALID",
    "SIZE_INVALID",
    "TAG_INVALID",
    "TOOMANYREQUESTS",
    "UNAUTHORIZED",
    "UNAVAILABLE",
    "UNKNOWN",
    "UNSUPPORTED",
];

/// Whether a response comes from the requested server, not from a redirect target.
pub(super) fn is_of(response: &Response, requested: &str) -> bool {
    let place = |url: &Url| (url.host_str().map(str::to_owned), url.port_or_known_default());
    requested.parse().is_ok_and(|requested: Url| place(&requested) == place(response.url()))
}

/// The known codes of an error document with their messages, in brackets. Empty for any other text.
pub(super) fn of(body: &[u8]) -> String {
    let document: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let errors = document.as_ref().and_then(|d| d.get("errors")).and_then(|e| e.as_array());
    let word = |error: &serde_json::Value, key: &str| {
        error.get(key).and_then(|v| v.as_str()).unwrap_or_default().to_owned()
    };
    let reasons = errors.into_iter().flatten().filter_map(|error| {
        let code = word(error, "code");
        let message = line(&word(error, "message"), DETAIL_MAX);
        CODES.contains(&code.as_str()).then(|| format!("{code}: {message}"))
    });
    let reasons = line(&reasons.take(8).collect::<Vec<_>>().join("; "), DETAIL_MAX);
    if reasons.is_empty() { reasons } else { format!(" ({reasons})") }
}

/// A URL from outside, without credentials, query and fragment, because these parts may be secret.
pub(super) fn without_secrets(url: &str) -> String {
    let Ok(mut url) = url.parse::<Url>() else { return "an invalid URL".to_owned() };
    // These fail for URLs that cannot have credentials.
    let _ = (url.set_username(""), url.set_password(None));
    url.set_query(None);
    url.set_fragment(None);
    line(url.as_str(), URL_MAX)
}

/// The beginning of a text, in one line and without control characters.
fn line(text: &str, most: usize) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut clean: String = line.chars().filter(|c| !c.is_control()).collect();
    clean.truncate(clean.floor_char_boundary(most));
    clean
}

#[cfg(test)]
mod tests {
    use super::{DETAIL_MAX, of, without_secrets};

    #[test]
    fn the_reason_of_a_registry_is_short_and_printable() {
        let document =
            br#"{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest\n\u0007 unknown","detail":{"a":"b"}}]}"#;
        assert_eq!(of(document), " (MANIFEST_UNKNOWN: manifest unknown)");
        let long = format!(r#"{{"errors":[{{"code":"DENIED","message":"{}"}}]}}"#, "x".repeat(5000));
        assert_eq!(of(long.as_bytes()).len(), DETAIL_MAX + 3);
    }

    #[test]
    fn text_other_than_error_documents_is_not_passed_on() {
        for other in [
            &b"<html>\n \x07Bad gateway"[..],
            b"root:x:0:0",
            br#"{"errors":[{"code":"AKIA123","message":"secret"}]}"#,
            br#"{"errors":"secret"}"#,
            br#""secret""#,
            b"",
        ] {
            assert_eq!(of(other), "", "{}", String::from_utf8_lossy(other));
        }
    }

    #[test]
    fn secrets_are_removed_from_a_foreign_url() {
        assert_eq!(without_secrets("https://u:p@h.example/t?key=s#f"), "https://h.example/t");
        assert_eq!(without_secrets("Registry Realm\n"), "an invalid URL");
        assert!(without_secrets(&format!("https://h.example/{}", "x".repeat(5000))).len() <= 256);
    }
}
