//! A client that stops at a write, as if its process was killed there.

use std::sync::Arc;

use http::{Method, Request};
use kube::Client;
use kube::client::Body;
use tokio::sync::watch;

/// The point at which a process dies.
#[derive(Clone, Copy, Debug)]
pub(super) enum Point {
    /// Before this write, counted from 1.
    Before(usize),
    /// After this write took effect, before its response arrives.
    After(usize),
}

/// A process that dies at a point.
pub(super) struct Fault {
    point: Point,
    state: watch::Sender<State>,
}

#[derive(Default)]
struct State {
    writes: usize,
    /// Writes that were sent and have no response yet. The next process starts after they took effect.
    pending: usize,
    is_dead: bool,
}

// === impl Fault ===

impl Fault {
    pub(super) fn new(point: Point) -> Arc<Self> {
        Arc::new(Self { point, state: watch::Sender::default() })
    }

    /// A client whose requests pass until the process is dead.
    pub(super) fn client(self: &Arc<Self>, inner: &Client) -> Client {
        let (fault, inner) = (Arc::clone(self), inner.clone());
        let service = tower::service_fn(move |request: Request<Body>| {
            let (fault, inner) = (Arc::clone(&fault), inner.clone());
            async move {
                let is_write = request.method() != Method::GET;
                if !fault.begin(is_write, request.uri().path()) {
                    std::future::pending::<()>().await;
                }
                if !is_write {
                    return inner.send(request).await;
                }
                // The server finishes a write although its client is gone.
                let sent = tokio::spawn(async move {
                    let response = inner.send(request).await;
                    (response, fault.end())
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

    /// Counts a request. Returns whether it is sent.
    fn begin(&self, is_write: bool, path: &str) -> bool {
        // Events tell people about steps and are no steps themselves.
        let is_step = is_write && !path.contains("/events");
        let mut is_sent = false;
        self.state.send_if_modified(|state| {
            is_sent = !state.is_dead;
            if is_sent && is_step {
                state.writes += 1;
                match self.point {
                    Point::Before(last) if state.writes == last => {
                        (is_sent, state.is_dead) = (false, true);
                    }
                    Point::After(last) if state.writes == last => state.is_dead = true,
                    Point::Before(_) | Point::After(_) => {}
                }
            }
            state.pending += usize::from(is_sent && is_write);
            state.is_dead
        });
        is_sent
    }

    /// Counts the response to a write. Returns whether the process receives it.
    fn end(&self) -> bool {
        self.state.send_modify(|state| state.pending -= 1);
        !self.state.borrow().is_dead
    }

    /// Waits for the death, and until all writes that were sent took effect.
    pub(super) async fn died(&self) {
        let mut state = self.state.subscribe();
        state.wait_for(|state| state.is_dead && state.pending == 0).await.expect("the sender lives");
    }
}
