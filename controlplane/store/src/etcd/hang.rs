//! Members of etcd that hang: their connections stay open, but they do not respond. Examples are a stopped process, a
//! broken disk and a broken network. The pings of the connection detect only some of these failures, and only after 15
//! seconds. etcd refuses clients that send pings more often than every 5 seconds (`--grpc-keepalive-min-time`).
//!
//! If a request has waited for [`SUSPECT_AFTER`], all members are checked. If the member of the request does not
//! respond and another member responds, all watches and all requests that may be repeated change to the other member at
//! once.

use std::{sync::Arc, time::Duration};

use futures::future::join_all;
use tokio::sync::{Mutex, MutexGuard, watch};
use tonic::{Code, Status, transport::Channel};

use super::api::{RangeRequest, kv_client::KvClient};

/// Time without a response after which a member is checked. The sum of this time and [`CHECK_TIMEOUT`] is shorter than
/// the time for which a read of the API server waits for the newest revision.
pub(super) const SUSPECT_AFTER: Duration = Duration::from_millis(500);
/// Maximum time for the response to a check.
const CHECK_TIMEOUT: Duration = Duration::from_millis(500);

/// The reports of members that hang.
pub(super) struct Hangs {
    /// Number of reports for each member.
    reports: watch::Sender<Arc<[u64]>>,
    /// Lock that allows one check of members at a time.
    checking: Mutex<()>,
}

/// Receiver of the reports that are made after its creation.
pub(super) struct HangNotice {
    reports: watch::Receiver<Arc<[u64]>>,
    known: Arc<[u64]>,
}

// === impl Hangs ===

impl Hangs {
    pub(super) fn new(members: usize) -> Self {
        Self { reports: watch::Sender::new(Arc::from(vec![0_u64; members])), checking: Mutex::new(()) }
    }

    /// Waits until no other task checks a member.
    pub(super) async fn check(&self) -> MutexGuard<'_, ()> {
        self.checking.lock().await
    }

    /// Reports that a member hangs.
    pub(super) fn report(&self, index: usize) {
        self.reports.send_modify(|reports| {
            let add = |(at, count): (usize, &u64)| count + u64::from(at == index);
            *reports = reports.iter().enumerate().map(add).collect();
        });
    }

    pub(super) fn notice(&self) -> HangNotice {
        let mut reports = self.reports.subscribe();
        let known = reports.borrow_and_update().clone();
        HangNotice { reports, known }
    }
}

// === impl HangNotice ===

impl HangNotice {
    /// Waits until a member is reported.
    pub(super) async fn reported(mut self, index: usize) {
        loop {
            if self.reports.borrow_and_update().get(index) != self.known.get(index) {
                return;
            }
            if self.reports.changed().await.is_err() {
                // The connection does not exist any more, so there will be no reports.
                return std::future::pending().await;
            }
        }
    }
}

/// The member that replaces the member at `index`: the next member that responds. `None` if the member itself responds,
/// or if no member responds, for example because etcd has no leader.
pub(super) async fn replacement(channels: &[Channel], index: usize) -> Option<usize> {
    let count = channels.len();
    let checks = (0..count).map(|step| {
        let at = (index + step) % count;
        let channel = channels.get(at).cloned();
        async move {
            match channel {
                Some(channel) => responds(channel).await.then_some(at),
                None => None,
            }
        }
    });
    first_unless_own(join_all(checks).await)
}

/// The first member that responds. The list begins with the member that is checked. `None` if this member responds.
fn first_unless_own(responding: Vec<Option<usize>>) -> Option<usize> {
    let mut responding = responding.into_iter();
    match responding.next() {
        Some(None) => responding.flatten().next(),
        Some(Some(_)) | None => None,
    }
}

/// Whether the member could not process the request. Another member may be able to process it.
pub(super) fn is_unreachable(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled)
}

/// Whether a member responds to a linearizable read. A refused read is a response, too.
async fn responds(channel: Channel) -> bool {
    let mut client = KvClient::new(channel);
    let request = RangeRequest { key: b"health".to_vec(), count_only: true, ..RangeRequest::default() };
    match tokio::time::timeout(CHECK_TIMEOUT, client.range(request)).await {
        Ok(Ok(_response)) => true,
        Ok(Err(status)) => !is_unreachable(&status),
        Err(_elapsed) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_member_that_does_not_respond_itself_is_replaced() {
        for (responding, expected) in [
            (vec![Some(0), Some(1)], None),
            (vec![None, Some(1), Some(2)], Some(1)),
            (vec![None, None, Some(2)], Some(2)),
            (vec![None, None, None], None),
            (Vec::new(), None),
        ] {
            assert_eq!(first_unless_own(responding.clone()), expected, "{responding:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_notice_knows_only_later_reports_of_its_member() {
        let hangs = Hangs::new(2);
        hangs.report(0);
        let is_reported = async |notice: HangNotice, index| {
            tokio::time::timeout(Duration::from_secs(1), notice.reported(index)).await.is_ok()
        };
        let [first, second] = [hangs.notice(), hangs.notice()];
        hangs.report(1);
        assert!(!is_reported(first, 0).await);
        assert!(is_reported(second, 1).await);
    }
}
