//! The watch of PodGroups.

use std::time::Duration;

use coracle_watch::{Config, Event};
use futures::StreamExt;
use futures::stream::{BoxStream, unfold};
use kube::{Client, Error};

use super::object::PodGroup;
use crate::watch::stream;

const VERSION: &str = "scheduling.k8s.io/v1alpha2";
/// Interval of checks while the API server does not serve the kind.
const UNSERVED_CHECK_INTERVAL: Duration = Duration::from_secs(300);
/// Delay after a failed check.
const RETRY_DELAY: Duration = Duration::from_secs(5);

/// A change of the groups.
#[derive(Debug)]
pub(crate) enum Change {
    /// An event of the watch.
    Watched(Box<Event<PodGroup>>),
    /// The API server does not serve the kind.
    NotServed,
}

/// The watch of PodGroups. It starts with the first pod that is a member of a group. An API server that does not serve
/// the kind accepts no such pods.
#[derive(Default)]
pub(crate) struct Feed {
    changes: Option<BoxStream<'static, Change>>,
}

impl Feed {
    /// Starts the watch, unless it runs.
    pub(crate) fn start(&mut self, client: &Client) {
        self.changes.get_or_insert_with(|| changes(client));
    }

    /// Ends the watch.
    pub(crate) fn stop(&mut self) {
        self.changes = None;
    }

    /// Waits for the next change. The future is never ready if the watch does not run. The future is cancel-safe.
    pub(crate) async fn next(&mut self) -> Change {
        loop {
            let Some(changes) = &mut self.changes else { return std::future::pending().await };
            match changes.next().await {
                Some(change) => return change,
                // The stream never ends.
                None => self.changes = None,
            }
        }
    }
}

/// The changes of the groups. While the API server does not serve the kind, the stream yields [`Change::NotServed`]
/// after each check. Then it watches the kind.
fn changes(client: &Client) -> BoxStream<'static, Change> {
    let watch =
        stream::<PodGroup>(client, Config::control_plane()).map(|event| Change::Watched(Box::new(event)));
    let absent = unfold((client.clone(), Duration::ZERO), async |(client, mut delay)| {
        loop {
            tokio::time::sleep(delay).await;
            match is_served(&client).await {
                Ok(true) => return None,
                Ok(false) => return Some((Change::NotServed, (client, UNSERVED_CHECK_INTERVAL))),
                Err(error) => {
                    tracing::debug!(version = VERSION, %error, "cannot read the kinds of a version");
                    delay = RETRY_DELAY;
                }
            }
        }
    });
    absent.chain(watch).boxed()
}

async fn is_served(client: &Client) -> Result<bool, Error> {
    match client.list_api_group_resources(VERSION).await {
        Ok(list) => Ok(list.resources.iter().any(|kind| kind.name == "podgroups")),
        Err(Error::Api(status)) if status.is_not_found() => Ok(false),
        Err(error) => Err(error),
    }
}
