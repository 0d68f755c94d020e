//! Devices of device plugins in the status of the Node.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use tokio::sync::watch;
use tokio::time::Instant;

/// Minimum time between two updates of the Node because of devices. A faulty plugin could register repeatedly, with
/// other devices each time.
const MIN_UPDATE_INTERVAL: Duration = Duration::from_secs(1);

/// Number of devices of a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceCount {
    pub(crate) capacity: usize,
    /// Healthy devices.
    pub(crate) allocatable: usize,
}

/// Numbers of devices by resource.
pub(crate) type DeviceCounts = BTreeMap<String, DeviceCount>;

/// Changes of the numbers of devices that the Node reports.
pub(super) struct DeviceChanges {
    counts: watch::Receiver<DeviceCounts>,
    /// Whether a change has not been reported.
    is_due: bool,
    /// Earliest time of the next update.
    next: Instant,
}

// === impl DeviceChanges ===

impl DeviceChanges {
    pub(super) fn new(counts: watch::Receiver<DeviceCounts>) -> Self {
        Self { counts, is_due: false, next: Instant::now() }
    }

    /// Waits until a change must be reported. Cancel-safe.
    pub(super) async fn changed(&mut self) {
        if !self.is_due {
            // The sender is dropped only when the agent ends.
            let _ = self.counts.changed().await;
            self.is_due = true;
        }
        tokio::time::sleep_until(self.next).await;
        self.is_due = false;
        // One update reports all changes.
        self.counts.mark_unchanged();
        self.next = Instant::now() + MIN_UPDATE_INTERVAL;
    }
}

/// Sets the numbers of devices in the capacity and the allocatable resources of the node.
pub(super) fn add(
    counts: &DeviceCounts,
    capacity: &mut BTreeMap<String, Quantity>,
    allocatable: &mut BTreeMap<String, Quantity>,
) {
    for (name, count) in counts {
        capacity.insert(name.clone(), Quantity(count.capacity.to_string()));
        allocatable.insert(name.clone(), Quantity(count.allocatable.to_string()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_first_change_is_reported_at_once_and_the_next_ones_are_delayed() {
        let (sender, counts) = watch::channel(DeviceCounts::new());
        let mut changes = DeviceChanges::new(counts);
        let started = Instant::now();
        sender.send_modify(|_| {});
        changes.changed().await;
        assert!(started.elapsed() < MIN_UPDATE_INTERVAL);
        sender.send_modify(|_| {});
        // The timeout cancels the wait, like any other event that a caller waits for at the same time.
        assert!(tokio::time::timeout(MIN_UPDATE_INTERVAL / 2, changes.changed()).await.is_err());
        changes.changed().await;
        assert!(started.elapsed() >= MIN_UPDATE_INTERVAL);
    }
}
