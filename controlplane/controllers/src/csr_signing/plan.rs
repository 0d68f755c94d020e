//! The requests that the controller signs, and the status of a request that it refuses.

use serde_json::{Value, json};

use crate::certificate::{CLIENT, NODE_CLIENT, NODE_SERVING};
use crate::object::CertificateSigningRequest;

/// Whether the request is approved, for one of the signers of this controller, and neither signed nor failed.
pub(super) fn is_ready(request: &CertificateSigningRequest) -> bool {
    [CLIENT, NODE_CLIENT, NODE_SERVING].contains(&request.spec.signer_name.as_str())
        && request.condition("Approved").is_some()
        && request.condition("Denied").is_none()
        && request.condition("Failed").is_none()
        && request.status.certificate.is_none()
}

/// The status of a request that is refused for this reason.
pub(super) fn failed(request: &CertificateSigningRequest, why: &str) -> Value {
    let mut conditions: Vec<Value> = request.status.conditions.iter().map(|known| json!(known)).collect();
    conditions.push(
        json!({"type": "Failed", "status": "True", "reason": "SignerValidationFailure", "message": why}),
    );
    json!({"conditions": conditions})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(signer: &str, conditions: &[&str], certificate: Value) -> CertificateSigningRequest {
        let conditions = conditions.iter().map(|kind| json!({"type": kind, "status": "True"}));
        let status = json!({"conditions": conditions.collect::<Vec<_>>(), "certificate": certificate});
        serde_json::from_value(
            json!({"metadata": {"name": "r"}, "spec": {"signerName": signer}, "status": status}),
        )
        .unwrap()
    }

    #[test]
    fn only_approved_requests_without_a_result_are_signed() {
        for signer in [CLIENT, NODE_CLIENT, NODE_SERVING] {
            assert!(is_ready(&request(signer, &["Approved"], Value::Null)), "{signer}");
        }
        assert!(!is_ready(&request("example.com/signer", &["Approved"], Value::Null)));
        let refused: [&[&str]; 4] = [&[], &["Denied"], &["Approved", "Denied"], &["Approved", "Failed"]];
        for conditions in refused {
            assert!(!is_ready(&request(CLIENT, conditions, Value::Null)), "{conditions:?}");
        }
        assert!(!is_ready(&request(CLIENT, &["Approved"], json!("YQ=="))), "it is signed already");
    }

    #[test]
    fn a_refused_request_keeps_its_conditions() {
        let status = failed(&request(CLIENT, &["Approved"], Value::Null), "no key");
        let kinds: Vec<_> = status["conditions"].as_array().unwrap().iter().map(|one| &one["type"]).collect();
        assert_eq!(kinds, ["Approved", "Failed"]);
        assert_eq!(status["conditions"][1]["message"], "no key");
    }
}
