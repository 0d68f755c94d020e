//! Certificate signing requests: valid contents, and allowed changes by approvers and signers.

use std::collections::HashSet;

use base64::Engine;
use serde_json::Value;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::pem::{Pem, parse_x509_pem};
use x509_parser::prelude::{FromDer, X509Certificate};

use super::{Causes, Path, format, items, text};

/// Key usages that a request may have.
const USAGES: &[&str] = &[
    "any",
    "cert sign",
    "client auth",
    "code signing",
    "content commitment",
    "crl sign",
    "data encipherment",
    "decipher only",
    "digital signature",
    "email protection",
    "encipher only",
    "ipsec end system",
    "ipsec tunnel",
    "ipsec user",
    "key agreement",
    "key encipherment",
    "microsoft sgc",
    "netscape sgc",
    "ocsp signing",
    "s/mime",
    "server auth",
    "signing",
    "timestamping",
];
const MIN_SECONDS: i64 = 600;
/// Maximum length of the domain of a signer, in bytes.
const MAX_SUBDOMAIN: usize = 253;
/// Maximum length of the name of a signer: a domain, and a path with room for a label, a dot and a subdomain.
const MAX_SIGNER: usize = 571;
/// Conditions that stay once they are set.
const FINAL: [&str; 3] = ["Approved", "Denied", "Failed"];

pub(crate) fn signing_request(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let (path, spec) = (Path::root("spec"), &object["spec"]);
    if let Err(why) = request(&spec["request"]) {
        causes.invalid(&path.field("request"), &spec["request"], why);
    }
    usages(causes, &path.field("usages"), &spec["usages"]);
    signer(causes, &path.field("signerName"), &spec["signerName"]);
    let seconds = &spec["expirationSeconds"];
    if seconds.as_i64().is_some_and(|seconds| seconds < MIN_SECONDS) {
        let detail = "may not specify a duration less than 600 seconds (10 minutes)";
        causes.invalid(&path.field("expirationSeconds"), seconds, detail);
    }
    status(causes, object, old);
}

/// Checks the conditions and the certificate, on every write.
pub(crate) fn status(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    let path = Path::root("status");
    conditions(causes, &path.field("conditions"), &object["status"]["conditions"]);
    let certificate = &object["status"]["certificate"];
    if !text(certificate).is_empty()
        && let Err(why) = chain(certificate)
    {
        causes.invalid(&path.field("certificate"), &"<certificate data>".into(), why);
    }
    let Some(old) = old else { return };
    let before = &old["status"]["certificate"];
    if !text(before).is_empty() && before != certificate {
        causes.forbidden(&path.field("certificate"), "updates may not modify existing certificate content");
    }
    let count = |object: &Value, type_: &str| {
        items(&object["status"]["conditions"]).filter(|(_, condition)| condition["type"] == type_).count()
    };
    for type_ in FINAL {
        if count(object, type_) < count(old, type_) {
            let detail = format!("updates may not remove a condition of type {type_:?}");
            causes.forbidden(&path.field("conditions"), &detail);
        }
    }
}

/// Checks a PKCS#10 request in PEM, and that it is signed with its own key.
fn request(value: &Value) -> Result<(), &'static str> {
    let pem = decode(value).ok_or("PEM block type must be CERTIFICATE REQUEST")?;
    if pem.label != "CERTIFICATE REQUEST" {
        return Err("PEM block type must be CERTIFICATE REQUEST");
    }
    let (_, request) = X509CertificationRequest::from_der(&pem.contents)
        .map_err(|_malformed| "not a certificate request in DER")?;
    request.verify_signature().map_err(|_wrong| "the signature is not that of the request's own key")
}

/// Checks one certificate or a certificate chain.
fn chain(value: &Value) -> Result<(), &'static str> {
    let bytes = base64::engine::general_purpose::STANDARD.decode(text(value));
    let bytes = bytes.map_err(|_invalid| "must be valid base64")?;
    if has_headers(&bytes) {
        return Err("no PEM block headers are permitted");
    }
    let mut found = false;
    for pem in Pem::iter_from_buffer(&bytes) {
        let pem = pem.map_err(|_malformed| "must be valid PEM")?;
        if pem.label != "CERTIFICATE" {
            return Err("only CERTIFICATE PEM blocks are allowed");
        }
        X509Certificate::from_der(&pem.contents).map_err(|_malformed| "must contain valid certificates")?;
        found = true;
    }
    if found { Ok(()) } else { Err("must contain at least one CERTIFICATE PEM block") }
}

/// Whether a PEM block has headers: lines with a colon.
fn has_headers(pem: &[u8]) -> bool {
    let mut is_inside = false;
    pem.split(|byte| *byte == b'\n').any(|line| {
        if line.starts_with(b"-----") {
            is_inside = line.starts_with(b"-----BEGIN");
        }
        is_inside && line.contains(&b':')
    })
}

fn decode(value: &Value) -> Option<Pem> {
    let bytes = base64::engine::general_purpose::STANDARD.decode(text(value)).ok()?;
    Some(parse_x509_pem(&bytes).ok()?.1)
}

fn usages(causes: &mut Causes, path: &Path, usages: &Value) {
    let mut seen = HashSet::new();
    for (index, usage) in items(usages) {
        if !USAGES.contains(&text(usage)) {
            causes.unsupported(&path.index(index), usage, USAGES);
        } else if !seen.insert(text(usage)) {
            causes.duplicate(&path.index(index), usage);
        }
    }
    if items(usages).next().is_none() {
        causes.required(path, "");
    }
}

/// Checks a signer name: `example.com/name`.
fn signer(causes: &mut Causes, path: &Path, value: &Value) {
    let name = text(value);
    if name.is_empty() {
        return causes.required(path, "");
    }
    if name == "kubernetes.io/legacy-unknown" {
        return causes.invalid(path, value, "the legacy signerName is not allowed via this API version");
    }
    let parts = name.split_once('/').filter(|(_, rest)| !rest.contains('/'));
    let Some((domain, rest)) = parts else {
        let detail = "must be a fully qualified domain and path of the form 'example.com/signer-name'";
        return causes.invalid(path, value, detail);
    };
    if domain.len() > MAX_SUBDOMAIN {
        causes.too_long(path, MAX_SUBDOMAIN);
    }
    labels(causes, path, domain, format::dns1123_label);
    if !domain.contains('.') {
        let detail = "should be a domain with at least two segments separated by dots";
        causes.invalid(path, &domain.into(), detail);
    }
    labels(causes, path, rest, format::dns1123_subdomain);
    if name.len() > MAX_SIGNER {
        causes.too_long(path, MAX_SIGNER);
    }
}

/// Adds the problems of the first invalid label.
fn labels(causes: &mut Causes, path: &Path, part: &str, rule: fn(&str) -> Vec<String>) {
    let mut problems = part.split('.').map(|label| (label, rule(label)));
    if let Some((label, problems)) = problems.find(|(_, problems)| !problems.is_empty()) {
        for problem in problems {
            causes.invalid(path, &part.into(), &format!("validating label {label:?}: {problem}"));
        }
    }
}

fn conditions(causes: &mut Causes, path: &Path, list: &Value) {
    let mut seen = HashSet::new();
    for (index, condition) in items(list) {
        let (here, type_) = (path.index(index), text(&condition["type"]));
        if type_.is_empty() {
            causes.required(&here.field("type"), "");
        }
        let status = &condition["status"];
        match type_ {
            "Approved" | "Denied" | "Failed" => {
                if text(status).is_empty() {
                    causes.required(&here.field("status"), "");
                } else if status != "True" {
                    causes.unsupported(&here.field("status"), status, &["True"]);
                }
            }
            _ => causes.one_of(&here.field("status"), status, &["True", "False", "Unknown"]),
        }
        if !seen.insert(type_) {
            causes.duplicate(&here.field("type"), &type_.into());
        }
        let against = match type_ {
            "Approved" => "Denied",
            "Denied" => "Approved",
            _ => "",
        };
        if !against.is_empty() && seen.contains(against) {
            causes.invalid(path, &type_.into(), "Approved and Denied conditions are mutually exclusive");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pem() -> String {
        let params = rcgen::CertificateParams::default();
        let request = params.serialize_request(&rcgen::KeyPair::generate().unwrap()).unwrap();
        request.pem().unwrap()
    }

    fn encode(text: &str) -> String {
        base64::engine::general_purpose::STANDARD.encode(text)
    }

    fn good() -> Value {
        json!({"metadata": {"name": "r"}, "spec": {"request": encode(&pem()), "signerName": "example.com/a",
            "usages": ["client auth"]}, "status": {}})
    }

    /// The causes of a valid request after one change.
    fn said(change: impl FnOnce(&mut Value)) -> String {
        let (mut object, mut causes) = (good(), Causes::default());
        change(&mut object);
        signing_request(&mut causes, &object, None);
        causes.into_list().iter().map(|cause| format!("{}: {}; ", cause.field, cause.message)).collect()
    }

    #[test]
    fn each_wrong_field_is_named() {
        assert_eq!(said(|_| {}), "");
        assert!(said(|o| o["spec"]["request"] = encode("x").into()).contains("must be CERTIFICATE REQUEST"));
        let broken = pem().replace("CERTIFICATE REQUEST", "CERTIFICATE");
        assert!(
            said(|o| o["spec"]["request"] = encode(&broken).into()).contains("must be CERTIFICATE REQUEST")
        );
        assert!(said(|o| o["spec"]["usages"] = json!([])).starts_with("spec.usages: Required value"));
        assert!(
            said(|o| o["spec"]["usages"] = json!(["fly"])).starts_with("spec.usages[0]: Unsupported value")
        );
        assert!(said(|o| o["spec"]["usages"] = json!(["any", "any"])).contains("usages[1]: Duplicate value"));
        assert_eq!(said(|o| o["spec"]["signerName"] = format!("a.b/{}", "c".repeat(100)).into()), "");
        for (name, expect) in [
            ("A b.c/x", "Invalid value: \"A b.c\": validating label \"A b\": a lowercase RFC 1123 label"),
            ("a.b/X.y", "Invalid value: \"X.y\": validating label \"X\": a lowercase RFC 1123 subdomain"),
        ] {
            let found = said(|object| object["spec"]["signerName"] = name.into());
            assert!(found.contains(expect), "{found}");
        }
        for name in ["plain", "a.b/c/d", "word/x", "kubernetes.io/legacy-unknown", "a.b/", "a.b/C", "a..b/c"]
        {
            assert!(said(|o| o["spec"]["signerName"] = name.into()).starts_with("spec.signerName"), "{name}");
        }
        assert!(said(|o| o["spec"]["expirationSeconds"] = 599.into()).contains("600 seconds"));
    }

    #[test]
    fn a_request_signed_by_another_key_is_refused() {
        let mut der = parse_x509_pem(pem().as_bytes()).unwrap().1.contents;
        let last = der.len() - 1;
        der[last] ^= 1;
        let body = base64::engine::general_purpose::STANDARD.encode(der);
        let text =
            format!("-----BEGIN CERTIFICATE REQUEST-----\n{body}\n-----END CERTIFICATE REQUEST-----\n");
        assert!(said(|o| o["spec"]["request"] = encode(&text).into()).contains("signature"));
    }

    #[test]
    fn approval_and_denial_are_true_and_exclude_each_other() {
        let condition = |type_: &str, status: &str| json!({"type": type_, "status": status});
        let with = |list: Vec<Value>| said(|object| object["status"]["conditions"] = list.into());
        assert_eq!(with(vec![condition("Approved", "True")]), "");
        assert!(with(vec![condition("Approved", "False")]).contains("Unsupported value"));
        let both = with(vec![condition("Approved", "True"), condition("Denied", "True")]);
        assert!(both.contains("mutually exclusive"), "{both}");
    }

    #[test]
    fn a_certificate_is_valid_and_cannot_be_changed() {
        assert!(said(|o| o["status"]["certificate"] = encode("x").into()).contains("CERTIFICATE PEM block"));
        let mut old = good();
        old["status"] = json!({"certificate": "a", "conditions": [{"type": "Approved", "status": "True"}]});
        let mut causes = Causes::default();
        status(&mut causes, &good(), Some(&old));
        let fields: Vec<String> = causes.into_list().into_iter().map(|cause| cause.field).collect();
        assert_eq!(fields, ["status.certificate", "status.conditions"]);
    }

    #[test]
    fn conditions_of_other_types_may_go() {
        let of = |type_: &str| {
            let mut object = good();
            object["status"] = json!({"conditions": [{"type": type_, "status": "True"}]});
            object
        };
        let removed = |type_: &str| {
            let mut causes = Causes::default();
            status(&mut causes, &good(), Some(&of(type_)));
            causes.count()
        };
        assert_eq!((removed("Failed"), removed("example.com/a")), (1, 0));
    }

    #[test]
    fn headers_of_certificates_are_refused() {
        let pem = "-----BEGIN CERTIFICATE-----\nA: b\n\nAAAA\n-----END CERTIFICATE-----\n";
        assert!(said(|o| o["status"]["certificate"] = encode(pem).into()).contains("no PEM block headers"));
        assert!(!has_headers(b"a: b\n-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"));
    }
}
