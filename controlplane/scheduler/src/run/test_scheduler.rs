//! Schedulers for tests.

use kube::Client;

use super::{ExtenderCalls, Scheduler, SchedulerConfig};

/// A scheduler with the default configuration.
pub(super) fn scheduler(client: Client) -> Scheduler {
    let config = SchedulerConfig::default();
    let (recorder, _) = coracle_events::recorder(client.clone(), "");
    let calls = ExtenderCalls::new(&config).unwrap();
    Scheduler::new(client, config, (recorder, tokio::sync::watch::Sender::new(false)), calls)
}
