//! What a client may do at a streaming URL: one token, one use, one minute.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use coracle_proto::cri;
use tokio::time::Instant;

use crate::lock::locked;

/// How long a token waits for its client.
const LIFE: Duration = Duration::from_secs(60);

/// What a token lets its bearer do.
#[derive(Debug, Clone)]
pub(crate) enum Ticket {
    /// Run a command.
    Exec(cri::ExecRequest),
    /// Watch and feed the container's first process.
    Attach(cri::AttachRequest),
    /// Reach ports of the pod.
    PortForward(cri::PortForwardRequest),
}

/// The tokens that were given out. Old ones go when a new one comes: no timer runs.
#[derive(Debug, Default)]
pub(crate) struct Tokens {
    tickets: Mutex<HashMap<String, (Instant, Ticket)>>,
}

// === impl Ticket ===

impl Ticket {
    /// The first part of its URL's path.
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
    /// Gives a token out.
    pub(crate) fn give(&self, ticket: Ticket) -> String {
        let token = hex::encode(rand::random::<[u8; 16]>());
        let now = Instant::now();
        let mut tickets = locked(&self.tickets);
        tickets.retain(|_, (given, _)| now.duration_since(*given) < LIFE);
        tickets.insert(token.clone(), (now, ticket));
        token
    }

    /// Takes a token back, if it is good for this verb.
    pub(crate) fn take(&self, verb: &str, token: &str) -> Option<Ticket> {
        let mut tickets = locked(&self.tickets);
        if tickets.get(token).is_none_or(|(_, ticket)| ticket.verb() != verb) {
            return None;
        }
        let (given, ticket) = tickets.remove(token)?;
        (given.elapsed() < LIFE).then_some(ticket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_token_is_good_once_for_a_minute_and_its_verb() {
        let tokens = Tokens::default();
        let token = tokens.give(Ticket::Attach(cri::AttachRequest::default()));
        assert!(tokens.take("exec", &token).is_none());
        assert!(tokens.take("attach", &token).is_some());
        assert!(tokens.take("attach", &token).is_none());
        let token = tokens.give(Ticket::Attach(cri::AttachRequest::default()));
        tokio::time::advance(LIFE).await;
        assert!(tokens.take("attach", &token).is_none());
    }
}
