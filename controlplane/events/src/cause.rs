//! The cause of a failed request, for messages of events and conditions.

/// The message of the API server, or of the failed connection. The client's own text repeats the whole response.
#[must_use]
pub fn cause(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_is_the_message_of_the_server() {
        let status = serde_json::json!({"status": "Failure", "message": "pod p is being deleted", "reason": "Conflict",
            "code": 409});
        let error = kube::Error::Api(Box::new(serde_json::from_value(status).unwrap()));
        assert_eq!(cause(&error), "pod p is being deleted");
    }
}
