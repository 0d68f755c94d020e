//! The expiry of certificate signing requests.

use std::time::Duration;

use jiff::Timestamp;

use crate::object::CertificateSigningRequest;

/// Time after the decision (approved, denied or failed) at which a request is deleted, as upstream.
const MAX_DECIDED_AGE: Duration = Duration::from_secs(3600);
/// Time after the creation at which a request without a decision is deleted, as upstream.
const MAX_PENDING_AGE: Duration = Duration::from_secs(24 * 3600);

/// Time at which the request is deleted.
pub(crate) fn end(request: &CertificateSigningRequest) -> Option<Timestamp> {
    let verdicts = request
        .status
        .conditions
        .iter()
        .filter(|condition| ["Approved", "Denied", "Failed"].contains(&condition.type_.as_str()));
    let decided =
        verdicts.filter_map(|condition| condition.last_update_time.as_ref()).map(|time| time.0).min();
    match decided {
        Some(since) => since.checked_add(MAX_DECIDED_AGE).ok(),
        None => request.metadata.creation_timestamp.as_ref()?.0.checked_add(MAX_PENDING_AGE).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn decided_requests_are_deleted_earlier() {
        let request = |conditions| -> CertificateSigningRequest {
            let metadata = json!({"name": "r", "creationTimestamp": "2026-01-01T00:00:00Z"});
            serde_json::from_value(json!({"metadata": metadata, "status": {"conditions": conditions}}))
                .unwrap()
        };
        let at = |request| end(&request).unwrap().to_string();
        assert_eq!(at(request(json!([]))), "2026-01-02T00:00:00Z");
        for type_ in ["Approved", "Denied", "Failed"] {
            let condition =
                json!({"type": type_, "status": "True", "lastUpdateTime": "2026-01-01T02:00:00Z"});
            assert_eq!(at(request(json!([condition]))), "2026-01-01T03:00:00Z", "{type_}");
        }
    }
}
