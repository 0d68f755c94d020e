//! The expiry of certificate signing requests.

use std::time::Duration;

use jiff::Timestamp;
use x509_parser::pem::parse_x509_pem;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::object::CertificateSigningRequest;

/// Time from the issue of the certificate, or from the denial, to the deletion of the request, as upstream.
const MAX_DECIDED_AGE: Duration = Duration::from_secs(3600);
/// Time to the deletion of a request that has no decision, or that is approved but has no certificate, as upstream.
const MAX_PENDING_AGE: Duration = Duration::from_secs(24 * 3600);

/// Time at which the request is deleted.
pub(crate) fn end(request: &CertificateSigningRequest) -> Option<Timestamp> {
    let created = request.metadata.creation_timestamp.as_ref();
    let conditions = &request.status.conditions;
    if conditions.is_empty() {
        return created?.0.checked_add(MAX_PENDING_AGE).ok();
    }
    let is_issued = request.status.certificate.as_ref().is_some_and(|certificate| !certificate.0.is_empty());
    let verdicts = conditions.iter().filter_map(|condition| {
        let age = match condition.type_.as_str() {
            "Approved" if !is_issued => MAX_PENDING_AGE,
            "Approved" | "Denied" | "Failed" => MAX_DECIDED_AGE,
            _ => return None,
        };
        condition.last_update_time.as_ref().or(created)?.0.checked_add(age).ok()
    });
    let is_approved = conditions.iter().any(|condition| condition.type_ == "Approved");
    verdicts.chain(is_approved.then(|| expiry(request)).flatten()).min()
}

/// The end of the validity of the issued certificate. `None` without a readable certificate.
fn expiry(request: &CertificateSigningRequest) -> Option<Timestamp> {
    let (_, pem) = parse_x509_pem(&request.status.certificate.as_ref()?.0).ok()?;
    let (_, certificate) = X509Certificate::from_der(&pem.contents).ok()?;
    Timestamp::from_second(certificate.validity().not_after.timestamp()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;
    use serde_json::{Value, json};

    fn request(status: Value) -> CertificateSigningRequest {
        let metadata = json!({"name": "r", "creationTimestamp": "2026-01-01T00:00:00Z"});
        serde_json::from_value(json!({"metadata": metadata, "status": status})).unwrap()
    }

    fn condition(type_: &str) -> Value {
        json!({"type": type_, "status": "True", "lastUpdateTime": "2026-01-01T02:00:00Z"})
    }

    fn certificate(pem: &str) -> String {
        base64::engine::general_purpose::STANDARD.encode(pem)
    }

    #[test]
    fn decided_requests_are_deleted_earlier() {
        let at = |status| end(&request(status)).map(|time| time.to_string()).unwrap_or_default();
        assert_eq!(at(json!({"conditions": []})), "2026-01-02T00:00:00Z");
        assert_eq!(at(json!({"conditions": [condition("Other")]})), "");
        for type_ in ["Denied", "Failed"] {
            assert_eq!(at(json!({"conditions": [condition(type_)]})), "2026-01-01T03:00:00Z", "{type_}");
        }
        let approved =
            |certificate: Value| json!({"conditions": [condition("Approved")], "certificate": certificate});
        assert_eq!(at(approved(json!(null))), "2026-01-02T02:00:00Z", "the signer may be slow");
        assert_eq!(at(approved(certificate("x").into())), "2026-01-01T03:00:00Z");
    }

    #[test]
    fn a_request_ends_with_its_certificate() {
        let mut params = rcgen::CertificateParams::default();
        params.not_after = rcgen::date_time_ymd(2026, 1, 1) + Duration::from_secs(7800);
        let issued = params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap();
        let status =
            json!({"conditions": [condition("Approved")], "certificate": certificate(&issued.pem())});
        assert_eq!(end(&request(status)).unwrap().to_string(), "2026-01-01T02:10:00Z");
    }
}
