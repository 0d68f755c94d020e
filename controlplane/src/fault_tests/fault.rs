//! A client that stops at a write, as if its process was killed at this write.

use std::sync::Arc;

use http::{Method, Request};
use kube::Client;
use kube::client::Body;
use tokio::sync::watch;

/// Whether a write with this method and path counts.
pub(super) type IsStep = fn(&Method, &str) -> bool;

/// The point at which a process is killed. Writes that the server refuses do not count.
#[derive(Clone, Copy, Debug)]
pub(super) enum Point {
    /// The process is killed before this write, counted from 1.
    Before(usize),
    /// The process is killed after this write took effect, and before its response arrives.
    After(usize),
}

/// Kinds of requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    /// A write that counts. Writes of Event objects never count.
    Step,
    /// Any other write.
    Other,
}

/// A process that is killed at a point.
pub(super) struct Fault {
    point: Point,
    is_step: IsStep,
    state: watch::Sender<State>,
}

#[derive(Default)]
struct State {
    writes: usize,
    /// Writes that were sent and have no response yet. The next process starts after these writes took effect.
    pending: usize,
    is_dead: bool,
}

// === impl Fault ===

impl Fault {
    pub(super) fn new(point: Point, is_step: IsStep) -> Arc<Self> {
        Arc::new(Self { point, is_step, state: watch::Sender::default() })
    }

    /// A client whose requests pass until the process is dead.
    pub(super) fn client(self: &Arc<Self>, inner: &Client) -> Client {
        let (fault, inner) = (Arc::clone(self), inner.clone());
        let service = tower::service_fn(move |request: Request<Body>| {
            let (fault, inner) = (Arc::clone(&fault), inner.clone());
            async move {
                let kind = fault.kind_of(&request);
                if !fault.begin(kind) {
                    std::future::pending::<()>().await;
                }
                if kind == Kind::Read {
                    return inner.send(request).await;
                }
                // The server finishes a write although its client is gone.
                let sent = tokio::spawn(async move {
                    let response = inner.send(request).await;
                    let is_done = response.as_ref().is_ok_and(|response| response.status().is_success());
                    let is_alive = fault.end(kind == Kind::Step && is_done);
                    (response, is_alive)
                });
                let (response, is_alive) = sent.await.expect("the server handles the request");
                if !is_alive {
                    std::future::pending::<()>().await;
                }
                response
            }
        });
        Client::new(service, "default")
    }

    fn kind_of(&self, request: &Request<Body>) -> Kind {
        let path = request.uri().path();
        match *request.method() {
            Method::GET => Kind::Read,
            _ if !path.contains("/events") && (self.is_step)(request.method(), path) => Kind::Step,
            _ => Kind::Other,
        }
    }

    /// Begins a request. Returns whether it is sent.
    fn begin(&self, kind: Kind) -> bool {
        let mut is_sent = false;
        self.state.send_modify(|state| {
            if let Point::Before(last) = self.point
                && kind == Kind::Step
                && state.writes + 1 >= last
            {
                state.is_dead = true;
            }
            is_sent = !state.is_dead;
            state.pending += usize::from(is_sent && kind != Kind::Read);
        });
        is_sent
    }

    /// Ends a write. `is_step` is true if the write took effect and counts. Returns whether the process receives the
    /// response.
    fn end(&self, is_step: bool) -> bool {
        self.state.send_modify(|state| {
            state.pending -= 1;
            state.writes += usize::from(is_step);
            if let Point::After(last) = self.point
                && state.writes >= last
            {
                state.is_dead = true;
            }
        });
        !self.state.borrow().is_dead
    }

    /// Waits until the process is dead and all writes that it sent took effect.
    pub(super) async fn died(&self) {
        let mut state = self.state.subscribe();
        state.wait_for(|state| state.is_dead && state.pending == 0).await.expect("the sender lives");
    }
}
