//! Repair of the firewall table after foreign changes, of which the kernel notifies this process.

use std::time::Duration;

use coracle_nft::Monitor;
use tracing::{info, warn};

use crate::host::Host;

/// Delay before a retry.
const RETRY_DELAY: Duration = Duration::from_secs(10);

/// Repairs the table after each foreign change, as long as the host exists. The task waits for notifications of the
/// kernel, and for a timer while a repair fails.
pub(crate) async fn keep(host: std::sync::Weak<Host>, mut monitor: Monitor) {
    loop {
        match monitor.notifications().await {
            Ok(Some(events)) => match host.upgrade() {
                Some(host) if !is_foreign(&host, events) => continue,
                Some(_) => {}
                None => return,
            },
            // Notifications were lost: one of them may have been a foreign change.
            Ok(None) => {}
            Err(error) => {
                warn!(%error, "cannot receive firewall notifications, opening another socket");
                tokio::time::sleep(RETRY_DELAY).await;
                match Monitor::open() {
                    Ok(reopened) => monitor = reopened,
                    // The old socket reports its error again.
                    Err(error) => {
                        warn!(%error, "cannot open a socket for firewall notifications");
                        continue;
                    }
                }
            }
        }
        info!("the firewall table may have been changed by another process, repairing it");
        while !host.upgrade().is_none_or(|host| repair(&host)) {
            tokio::time::sleep(RETRY_DELAY).await;
        }
    }
}

fn is_foreign(host: &Host, events: &[u8]) -> bool {
    let guard = host.guard.as_ref().and_then(|guard| guard.author());
    let connections = host.connections.as_ref();
    let others = [guard, connections.and_then(|connections| connections.author())];
    host.firewall.is_foreign(events, connections.map(|connections| connections.table()), others)
}

/// Repairs the tables. Returns whether that succeeded.
fn repair(host: &Host) -> bool {
    let repaired = host.firewall.repair();
    let repaired = repaired.and(host.guard.as_ref().map_or(Ok(()), |guard| guard.repair()));
    if let Some(connections) = &host.connections {
        connections.repair();
    }
    if let Err(error) = &repaired {
        warn!(error = error.chain(), "cannot repair the firewall table, retrying");
    }
    repaired.is_ok()
}
