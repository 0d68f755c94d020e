//! Schedulers for tests.

use std::convert::Infallible;

use http::{Request, Response};
use kube::Client;
use kube::client::Body;

use super::{ExtenderCalls, Scheduler, SchedulerConfig};

/// A scheduler with the default configuration.
pub(super) fn scheduler(client: Client) -> Scheduler {
    let config = SchedulerConfig::default();
    let (recorder, _) = coracle_events::recorder(client.clone(), "");
    let calls = ExtenderCalls::new(&config).unwrap();
    Scheduler::new(client, config, recorder, tokio::sync::watch::Sender::new(false), calls)
}

/// A scheduler with the default configuration, and an API server that accepts all requests.
pub(super) fn scheduler_of_accepting_server() -> Scheduler {
    let service = tower::service_fn(|_request: Request<Body>| async {
        Ok::<_, Infallible>(Response::new(Body::from(b"{}".to_vec())))
    });
    scheduler(Client::new(service, ""))
}
