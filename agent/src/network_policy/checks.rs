//! Checks of open connections after changes of policies. A check runs on a thread of its own, so that later changes do
//! not wait for it.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_backoff::Backoff;
use coracle_network_policy::{ConnectionCounts, Effect, Model, mark_connections};
use coracle_nft::Channel;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::deadline::until;

/// Minimum delay after a check, before the next check. A check takes 8 to 20 ms of a processor, because the kernel
/// walks through its table of connections. During a burst of changes, one check serves all changes during a delay.
const MIN_CHECK_DELAY: Duration = Duration::from_millis(100);
/// Maximum back-off after failed checks. The first back-off is [`MIN_CHECK_DELAY`]. A kernel without connection
/// tracking by netlink fails each check.
const MAX_BACKOFF: Duration = Duration::from_secs(600);

/// The policies and pods, which a check reads while they change. Each connection gets the verdict of one moment; the
/// connections that a later change concerns are checked again after that change.
#[derive(Clone, Default)]
pub(super) struct SharedModel(Arc<Mutex<Model>>);

/// Connections to check.
#[derive(Debug, PartialEq, Eq)]
enum Due {
    /// Connections of these addresses.
    Of(BTreeSet<IpAddr>),
    All,
}

/// Result of a check.
struct Outcome {
    is_complete: bool,
    /// The counts, and the channel for the next check.
    marked: io::Result<(ConnectionCounts, Channel)>,
}

/// Marks open connections that the policies no longer allow. At most one check runs at a time.
pub(super) struct Checks {
    model: SharedModel,
    /// Connections that changes concerned since the running check began, or all connections after a failed check.
    due: Option<Due>,
    running: Option<JoinHandle<Outcome>>,
    /// End of the delay after the last check, or of the back-off after a failed check. The time may have passed.
    delayed_until: Option<Instant>,
    /// The socket of the checks, while no check runs.
    channel: Option<Channel>,
    /// Whether conntrack entries have the mark. A later change may allow their connections.
    has_forbidden: bool,
    /// Whether the last check failed.
    has_failed: bool,
    backoff: Backoff,
}

// === impl SharedModel ===

impl SharedModel {
    /// The model. A check needs it for each connection, so it must not be held for long.
    pub(super) fn lock(&self) -> MutexGuard<'_, Model> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Due ===

impl Due {
    fn and(self, other: Option<Self>) -> Self {
        match (self, other) {
            (Self::Of(addresses), None) => Self::Of(addresses),
            (Self::Of(addresses), Some(Self::Of(others))) => Self::Of(&addresses | &others),
            (Self::All, _) | (_, Some(Self::All)) => Self::All,
        }
    }

    fn addresses(&self) -> Option<&BTreeSet<IpAddr>> {
        match self {
            Self::Of(addresses) => Some(addresses),
            Self::All => None,
        }
    }
}

// === impl Checks ===

impl Checks {
    pub(super) fn new(model: SharedModel) -> Self {
        Self {
            model,
            due: None,
            running: None,
            delayed_until: None,
            channel: None,
            has_forbidden: false,
            has_failed: false,
            backoff: Backoff::new(MIN_CHECK_DELAY, MAX_BACKOFF),
        }
    }

    /// Checks connections after a change of the table. `None` if the table was replaced. After a failed check all
    /// connections are checked, and a change does not wait for the end of the back-off.
    pub(super) fn begin(&mut self, effect: Option<Effect>) {
        // The running check may mark a connection that the change allows.
        let may_be_forbidden = self.has_forbidden || self.running.is_some();
        let due = match effect {
            Some(Effect::None) => return,
            Some(Effect::Allows(_)) if !may_be_forbidden => return,
            Some(Effect::Allows(addresses) | Effect::MayForbid(addresses)) if !self.has_failed => {
                Due::Of(addresses)
            }
            _ => Due::All,
        };
        self.due = Some(due.and(self.due.take()));
        if self.has_failed {
            let soon = Instant::now() + MIN_CHECK_DELAY;
            self.delayed_until = self.delayed_until.map(|at| at.min(soon));
        }
        self.start();
    }

    /// Starts the next check, unless one runs, or has ended shortly before.
    fn start(&mut self) {
        if self.running.is_some() || self.delayed_until.is_some_and(|at| at > Instant::now()) {
            return;
        }
        if let Some(due) = self.due.take() {
            let (model, channel) = (self.model.clone(), self.channel.take());
            self.running = Some(coracle_threads::spawn_blocking(move || Outcome {
                is_complete: due == Due::All,
                marked: check(channel, &model, due.addresses()),
            }));
        }
    }

    /// Returns after the end of a check, or after the start of a check that was due. Waits forever if no check runs or
    /// is due. Cancel safe.
    pub(super) async fn next(&mut self) {
        if let Some(running) = &mut self.running {
            let outcome = running.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
            self.running = None;
            return self.end(outcome);
        }
        // A check that is due waits for the end of the delay after the previous check.
        until(self.delayed_until.filter(|_| self.due.is_some())).await;
        self.delayed_until = None;
        self.start();
    }

    fn end(&mut self, Outcome { is_complete, marked }: Outcome) {
        match marked {
            Ok((counts, channel)) => {
                self.channel = Some(channel);
                self.has_failed = false;
                self.backoff.reset();
                self.delayed_until = Some(Instant::now() + MIN_CHECK_DELAY);
                self.has_forbidden = counts.forbidden > 0 || self.has_forbidden && !is_complete;
                tracing::debug!(
                    listed = counts.listed,
                    forbidden = counts.forbidden,
                    "checked open connections against the network policies"
                );
            }
            Err(error) => {
                (self.has_forbidden, self.has_failed) = (true, true);
                // Without another attempt, forbidden connections would stay open until the next change of a policy. A
                // check of the addresses that are due would not include those of the failed check.
                self.due = Some(Due::All);
                self.delayed_until = Some(Instant::now() + self.backoff.next_delay());
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot check open connections against the network policies, retrying"
                );
            }
        }
    }
}

/// Marks connections, see [`mark_connections`]. Opens the channel if there is none.
fn check(
    channel: Option<Channel>,
    model: &SharedModel,
    of: Option<&BTreeSet<IpAddr>>,
) -> io::Result<(ConnectionCounts, Channel)> {
    let mut channel = channel.map_or_else(Channel::open, Ok)?;
    let counts = mark_connections(&mut channel, of, |flow| model.lock().allows(flow))?;
    Ok((counts, channel))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_all_changes_during_a_check_are_checked_after_it() {
        let addresses = |numbers: &[u8]| -> BTreeSet<IpAddr> {
            numbers.iter().map(|number| IpAddr::from([10, 42, 0, *number])).collect()
        };
        coracle_testing::in_new_namespace_async(async move || {
            let mut checks = Checks::new(SharedModel::default());
            checks.begin(Some(Effect::None));
            checks.begin(Some(Effect::Allows(addresses(&[1]))));
            assert!(checks.running.is_none(), "no connection is forbidden");
            checks.begin(Some(Effect::MayForbid(addresses(&[1]))));
            assert!(checks.running.is_some() && checks.due.is_none());
            checks.begin(Some(Effect::Allows(addresses(&[2]))));
            checks.begin(Some(Effect::MayForbid(addresses(&[3]))));
            assert_eq!(checks.due, Some(Due::Of(addresses(&[2, 3]))));
            checks.next().await;
            assert!(checks.running.is_none() && checks.delayed_until.is_some(), "a delay follows a check");
            checks.delayed_until = Some(Instant::now() + Duration::from_secs(3600));
            checks.begin(Some(Effect::MayForbid(addresses(&[4]))));
            assert!(checks.running.is_none());
            assert_eq!(
                checks.due,
                Some(Due::Of(addresses(&[2, 3, 4]))),
                "one check serves all changes of a rest"
            );
            checks.delayed_until = Some(Instant::now());
            checks.next().await;
            assert!(checks.running.is_some() && checks.due.is_none(), "the next check");
            checks.begin(Some(Effect::MayForbid(addresses(&[4]))));
            checks.begin(None);
            checks.begin(Some(Effect::MayForbid(addresses(&[5]))));
            assert_eq!(checks.due, Some(Due::All));
            checks.next().await;
            checks.next().await;
            checks.next().await;
            assert!(checks.running.is_none() && checks.channel.is_some() && !checks.has_failed);
            checks.delayed_until = Some(Instant::now());
            checks.begin(Some(Effect::MayForbid(addresses(&[6]))));
            assert!(checks.running.is_some(), "a change after a rest is checked at once");
            checks.next().await;
        });
    }

    #[test]
    fn a_failed_check_is_repeated_for_all_connections_without_another_change() {
        coracle_testing::in_new_namespace_async(async move || {
            let mut checks = Checks::new(SharedModel::default());
            let effect = || Some(Effect::MayForbid([IpAddr::from([10, 42, 0, 1])].into()));
            let failed = || Outcome { is_complete: false, marked: Err(io::Error::other("no memory")) };
            checks.running = Some(tokio::task::spawn_blocking(failed));
            checks.begin(effect());
            checks.next().await;
            assert!(checks.has_failed && checks.running.is_none());
            assert_eq!(checks.due, Some(Due::All), "also the connections of the failed check");
            checks.next().await;
            assert!(checks.running.is_some() && checks.due.is_none());
            checks.next().await;
            assert!(!checks.has_failed && checks.due.is_none());
            checks.running = Some(tokio::task::spawn_blocking(failed));
            checks.next().await;
            checks.delayed_until = Some(Instant::now() + MAX_BACKOFF);
            checks.begin(effect());
            let soon = Instant::now() + MIN_CHECK_DELAY;
            assert!(checks.delayed_until.is_some_and(|at| at <= soon), "a change ends the back-off");
        });
    }
}
