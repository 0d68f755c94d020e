//! Tokens of stream URLs: each is valid once, within a minute.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use coracle_proto::cri;
use tokio::time::Instant;

use crate::lock::locked;

/// Validity of a token.
const TOKEN_VALIDITY: Duration = Duration::from_secs(60);

/// The request for which a token was issued.
#[derive(Debug, Clone)]
pub(crate) enum StreamRequest {
    /// Run a command.
    Exec(cri::ExecRequest),
    /// Attach to the container's first process.
    Attach(cri::AttachRequest),
    /// Forward ports of the pod.
    PortForward(cri::PortForwardRequest),
}

/// The issued tokens. Expired tokens are removed when a new token is issued, without a timer.
#[derive(Debug, Default)]
pub(crate) struct Tokens {
    requests: Mutex<HashMap<String, (Instant, StreamRequest)>>,
}

// === impl StreamRequest ===

impl StreamRequest {
    /// The first component of the URL's path.
    pub(crate) fn verb(&self) -> &'static str {
        match self {
            Self::Exec(_) => "exec",
            Self::Attach(_) => "attach",
            Self::PortForward(_) => "portforward",
        }
    }
}

// === impl Tokens ===

impl Tokens {
    /// Issues a token.
    pub(crate) fn issue(&self, request: StreamRequest) -> String {
        let token = hex::encode(rand::random::<[u8; 16]>());
        let now = Instant::now();
        let mut requests = locked(&self.requests);
        requests.retain(|_, (issued, _)| now.duration_since(*issued) < TOKEN_VALIDITY);
        requests.insert(token.clone(), (now, request));
        token
    }

    /// Returns the request of a token that is valid for this verb, and removes it.
    pub(crate) fn take(&self, verb: &str, token: &str) -> Option<StreamRequest> {
        let mut requests = locked(&self.requests);
        if requests.get(token).is_none_or(|(_, request)| request.verb() != verb) {
            return None;
        }
        let (issued, request) = requests.remove(token)?;
        (issued.elapsed() < TOKEN_VALIDITY).then_some(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_token_is_valid_once_within_a_minute_and_for_its_verb() {
        let tokens = Tokens::default();
        let token = tokens.issue(StreamRequest::Attach(cri::AttachRequest::default()));
        assert!(tokens.take("exec", &token).is_none());
        assert!(tokens.take("attach", &token).is_some());
        assert!(tokens.take("attach", &token).is_none());
        let token = tokens.issue(StreamRequest::Attach(cri::AttachRequest::default()));
        tokio::time::advance(TOKEN_VALIDITY).await;
        assert!(tokens.take("attach", &token).is_none());
    }
}
