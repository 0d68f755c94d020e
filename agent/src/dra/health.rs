//! The health of devices, which drivers may report in a stream (`v1alpha1.DRAResourceHealth`). Source: `healthinfo.go`
//! of `pkg/kubelet/cm/dra`.
//!
//! The health of a device is unknown if its driver has not reported it within the device's timeout, or if the stream
//! has ended.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_backoff::Backoff;
use coracle_events::printable;
use coracle_proto::dra_health as api;
use coracle_proto::dra_health::dra_resource_health_client::DraResourceHealthClient;
use tokio::sync::Notify;
use tokio::time::Instant;
use tonic::{Code, Status};

use super::driver::{ANSWER_MAX, Caller, NAME_MAX, origin};
use crate::deadline::until;

/// Time after which the health of a device is unknown, unless the driver sets another time, as in the kubelet
/// (`DefaultHealthTimeout`).
const TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum timeout of a device. A longer timeout is shortened to this maximum, so that no deadline can overflow.
const TIMEOUT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// Maximum devices of a driver whose health is kept.
const DEVICES_MAX: usize = 4096;
/// Maximum devices whose change of health is recorded until [`HealthTable::next_changes`] returns it.
const CHANGES_MAX: usize = 4 * DEVICES_MAX;
/// Maximum bytes of a message, as in the API.
const MESSAGE_MAX: usize = 1024;
/// Minimum time between two reports that are read, so that a driver cannot keep the node busy.
const MIN_REPORT_INTERVAL: Duration = Duration::from_millis(100);
/// First back-off before a stream is opened again, as in the kubelet. It doubles up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_secs(5);
const MAX_BACKOFF: Duration = Duration::from_secs(300);

/// The health of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Health {
    Healthy,
    Unhealthy,
    #[default]
    Unknown,
}

/// The health of a device, with the driver's message about it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceHealth {
    pub(crate) health: Health,
    pub(crate) message: String,
}

/// A device of a driver: pool and name.
pub(super) type Device = (String, String);

/// The health of the devices of all drivers.
#[derive(Debug, Default)]
pub(super) struct HealthTable {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Reports by the name of the driver.
    drivers: HashMap<String, Reports>,
    /// Number of the newest stream.
    last: u64,
    /// Devices whose health has changed: driver, pool and name.
    changes: BTreeSet<(String, Device)>,
}

/// The reports of the newest stream of a driver. During an upgrade a driver has two plugins.
#[derive(Debug, Default)]
struct Reports {
    stream: u64,
    devices: HashMap<Device, Report>,
}

/// An open stream of a driver. If it is dropped, as at the end of the connection, the health of the devices becomes
/// unknown.
struct Stream<'a> {
    table: &'a HealthTable,
    driver: &'a str,
    number: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Report {
    health: DeviceHealth,
    timeout: Duration,
    at: Instant,
}

// === impl Health ===

impl Health {
    /// The name in the status of pods.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Health::Healthy => "Healthy",
            Health::Unhealthy => "Unhealthy",
            Health::Unknown => "Unknown",
        }
    }
}

// === impl Report ===

impl Report {
    fn deadline(&self) -> Instant {
        self.at + self.timeout
    }
}

// === impl HealthTable ===

impl HealthTable {
    /// The health of a device.
    pub(super) fn get(&self, driver: &str, device: &Device) -> DeviceHealth {
        let state = self.state();
        let report = state.drivers.get(driver).and_then(|reports| reports.devices.get(device));
        let report = report.filter(|report| Instant::now() <= report.deadline());
        report.map(|report| report.health.clone()).unwrap_or_default()
    }

    /// Waits until the health of devices has changed. Returns them: driver, pool and name. Cancel-safe.
    pub(super) async fn next_changes(&self) -> BTreeSet<(String, Device)> {
        loop {
            let changes = std::mem::take(&mut self.state().changes);
            if !changes.is_empty() {
                return changes;
            }
            self.changed.notified().await;
        }
    }

    /// Follows the health that a plugin reports. Returns if the plugin does not implement the service.
    pub(super) async fn follow(&self, driver: &str, caller: &Caller) {
        let mut backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
        loop {
            let stream = Stream { table: self, driver, number: self.start() };
            let ended = self.follow_once(driver, stream.number, caller).await;
            let has_reported = self.state().has_reported(driver, stream.number);
            drop(stream);
            match ended {
                Err(status) if status.code() == Code::Unimplemented => return,
                Err(status) => {
                    let (code, error) = (status.code(), printable(status.message(), MESSAGE_MAX));
                    tracing::debug!(driver, ?code, error, "the health stream of a driver failed");
                }
                Ok(()) => tracing::debug!(driver, "the health stream of a driver has ended"),
            }
            if has_reported {
                backoff.reset();
            }
            tokio::time::sleep(backoff.next_delay()).await;
        }
    }

    async fn follow_once(&self, driver: &str, stream: u64, caller: &Caller) -> Result<(), Status> {
        let client = DraResourceHealthClient::with_origin(caller.clone(), origin());
        let mut client = client.max_decoding_message_size(ANSWER_MAX);
        let mut reports = client.node_watch_resources(api::NodeWatchResourcesRequest {}).await?.into_inner();
        loop {
            let expiry = self.next_expiry(driver, stream);
            // Cancel-safe: a report that is not complete stays in the stream.
            let report = tokio::select! {
                report = reports.message() => report?,
                // One millisecond later, the reports are too old.
                () = until(expiry.map(|expiry| expiry + Duration::from_millis(1))) => {
                    self.expire(driver, stream);
                    continue;
                }
            };
            let Some(report) = report else { return Ok(()) };
            self.report(driver, stream, report);
            tokio::time::sleep(MIN_REPORT_INTERVAL).await;
        }
    }

    /// The number of a new stream. Its reports replace the reports of earlier streams of the driver.
    fn start(&self) -> u64 {
        let mut state = self.state();
        state.last += 1;
        state.last
    }

    /// Ends a stream: the health of its devices is unknown.
    fn end(&self, driver: &str, stream: u64) {
        let mut state = self.state();
        let ended = if state.has_reported(driver, stream) { state.drivers.remove(driver) } else { None };
        let devices = ended.iter().flat_map(|reports| &reports.devices);
        let known = devices.filter(|(_, report)| report.health.health != Health::Unknown);
        state.add_changes(driver, known.map(|(device, _)| device.clone()));
        drop(state);
        self.changed.notify_one();
    }

    /// Records a report, which has all devices of the driver. Devices without a report stay until their timeout.
    fn report(&self, driver: &str, stream: u64, report: api::NodeWatchResourcesResponse) {
        let now = Instant::now();
        let mut state = self.state();
        let known = state.drivers.entry(driver.to_owned()).or_default();
        if known.stream > stream {
            return;
        }
        known.stream = stream;
        let mut changes = known.remove_expired(now);
        for one in report.devices.into_iter().take(DEVICES_MAX) {
            let Some((device, report)) = checked(one, now) else { continue };
            let old = known.devices.get(&device);
            if old.is_none() && known.devices.len() >= DEVICES_MAX {
                continue;
            }
            if old.map(|old| &old.health) != Some(&report.health) {
                changes.push(device.clone());
            }
            known.devices.insert(device, report);
        }
        let is_changed = !changes.is_empty();
        state.add_changes(driver, changes);
        drop(state);
        if is_changed {
            self.changed.notify_one();
        }
    }

    /// Removes the reports that are too old.
    fn expire(&self, driver: &str, stream: u64) {
        let mut state = self.state();
        let reports = state.drivers.get_mut(driver).filter(|reports| reports.stream == stream);
        let expired = reports.map(|reports| reports.remove_expired(Instant::now())).unwrap_or_default();
        state.add_changes(driver, expired);
        drop(state);
        self.changed.notify_one();
    }

    /// The time at which the next report of a stream is too old.
    fn next_expiry(&self, driver: &str, stream: u64) -> Option<Instant> {
        let state = self.state();
        let reports = state.drivers.get(driver).filter(|reports| reports.stream == stream)?;
        reports.devices.values().map(Report::deadline).min()
    }

    #[cfg(test)]
    pub(super) fn forget_changes(&self) {
        self.state().changes.clear();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl State ===

impl State {
    /// Records changed devices of a driver. Devices above the maximum are left out, because a driver can report new
    /// names without end.
    fn add_changes(&mut self, driver: &str, devices: impl IntoIterator<Item = Device>) {
        let room = CHANGES_MAX.saturating_sub(self.changes.len());
        self.changes.extend(devices.into_iter().take(room).map(|device| (driver.to_owned(), device)));
    }

    /// Whether the current reports of a driver come from this stream.
    fn has_reported(&self, driver: &str, stream: u64) -> bool {
        self.drivers.get(driver).is_some_and(|reports| reports.stream == stream)
    }
}

// === impl Stream ===

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        self.table.end(self.driver, self.number);
    }
}

// === impl Reports ===

impl Reports {
    /// Removes the reports that are too old. Returns their devices.
    fn remove_expired(&mut self, now: Instant) -> Vec<Device> {
        let expired = self.devices.extract_if(|_, report| report.deadline() < now);
        expired.map(|(device, _)| device).collect()
    }
}

/// The device of a report. `None` if its name is not valid.
fn checked(report: api::DeviceHealth, now: Instant) -> Option<(Device, Report)> {
    let health = match report.health() {
        api::HealthStatus::Healthy => Health::Healthy,
        api::HealthStatus::Unhealthy => Health::Unhealthy,
        api::HealthStatus::Unknown => Health::Unknown,
    };
    let device = report.device?;
    let is_valid =
        |name: &str| !name.is_empty() && name.len() <= NAME_MAX && !name.contains(char::is_control);
    if !is_valid(&device.pool_name) || !is_valid(&device.device_name) {
        return None;
    }
    let timeout = match u64::try_from(report.health_check_timeout_seconds) {
        Ok(seconds) if seconds > 0 => Duration::from_secs(seconds).min(TIMEOUT_MAX),
        _ => TIMEOUT,
    };
    let health = DeviceHealth { health, message: shortened(&report.message) };
    Some(((device.pool_name, device.device_name), Report { health, timeout, at: now }))
}

/// A message that the API accepts. A longer message ends with three dots, as in the kubelet.
fn shortened(message: &str) -> String {
    if message.len() <= MESSAGE_MAX {
        return printable(message, MESSAGE_MAX);
    }
    format!("{}...", printable(message, MESSAGE_MAX - 3))
}

#[cfg(test)]
mod tests {
    use super::*;

    const D: &str = "d.example.com";

    fn device(name: &str) -> Device {
        ("p".to_owned(), name.to_owned())
    }

    fn of(name: &str, health: api::HealthStatus, timeout: i64) -> api::DeviceHealth {
        let device = api::DeviceIdentifier { pool_name: "p".to_owned(), device_name: name.to_owned() };
        api::DeviceHealth {
            device: Some(device),
            health: health.into(),
            last_updated_time: 0,
            health_check_timeout_seconds: timeout,
            message: format!("about {name}"),
        }
    }

    fn report(table: &HealthTable, stream: u64, devices: Vec<api::DeviceHealth>) {
        table.report(D, stream, api::NodeWatchResourcesResponse { devices });
    }

    fn changes(table: &HealthTable) -> Vec<String> {
        std::mem::take(&mut table.state().changes).into_iter().map(|(_, (_, name))| name).collect()
    }

    fn health(table: &HealthTable, name: &str) -> Health {
        table.get(D, &device(name)).health
    }

    #[tokio::test(start_paused = true)]
    async fn the_health_of_a_device_is_known_until_its_timeout() {
        use api::HealthStatus::{Healthy, Unhealthy};
        let table = HealthTable::default();
        let stream = table.start();
        assert_eq!(health(&table, "a"), Health::Unknown);
        report(&table, stream, vec![of("a", Healthy, 0), of("b", Unhealthy, 60), of("c", Healthy, -1)]);
        assert_eq!(changes(&table), ["a", "b", "c"]);
        assert_eq!(table.get(D, &device("b")).message, "about b");
        tokio::time::sleep(Duration::from_secs(20)).await;
        report(&table, stream, vec![of("a", Healthy, 0), of("b", Unhealthy, 60)]);
        assert!(changes(&table).is_empty(), "nothing changed");
        tokio::time::sleep(Duration::from_secs(15)).await;
        assert_eq!(health(&table, "c"), Health::Unknown, "not reported for 35 seconds");
        assert_eq!((health(&table, "a"), health(&table, "b")), (Health::Healthy, Health::Unhealthy));
        table.expire(D, stream);
        assert_eq!(changes(&table), ["c"]);
        report(&table, stream, vec![of("a", Unhealthy, 0)]);
        assert_eq!(changes(&table), ["a"]);
        table.end(D, stream);
        assert_eq!(changes(&table), ["a", "b"], "the end of the stream changes all devices");
        assert_eq!(health(&table, "a"), Health::Unknown);
    }

    #[tokio::test(start_paused = true)]
    async fn the_reports_of_the_newest_plugin_of_a_driver_count() {
        use api::HealthStatus::{Healthy, Unhealthy};
        let table = HealthTable::default();
        let (old, new) = (table.start(), table.start());
        report(&table, old, vec![of("a", Healthy, 0)]);
        report(&table, new, vec![of("a", Unhealthy, 0)]);
        report(&table, old, vec![of("a", Healthy, 0)]);
        assert_eq!(health(&table, "a"), Health::Unhealthy);
        table.end(D, old);
        assert_eq!(health(&table, "a"), Health::Unhealthy);
    }

    #[test]
    fn reports_are_limited() {
        let now = Instant::now();
        let with = |name: &str, message: &str| {
            checked(
                api::DeviceHealth { message: message.to_owned(), ..of(name, api::HealthStatus::Healthy, 0) },
                now,
            )
        };
        for bad in ["", "a\nb", &"x".repeat(NAME_MAX + 1)] {
            assert_eq!(with(bad, ""), None, "{bad:?}");
        }
        let (_, long) = with("a", &"x".repeat(5000)).unwrap();
        assert!(long.health.message.len() == MESSAGE_MAX && long.health.message.ends_with("x..."));
        let (_, far) = checked(of("a", api::HealthStatus::Healthy, i64::MAX), now).unwrap();
        assert_eq!(far.timeout, TIMEOUT_MAX);
        let table = HealthTable::default();
        let many = (0..DEVICES_MAX + 10).map(|index| of(&index.to_string(), api::HealthStatus::Healthy, 0));
        report(&table, 1, many.collect());
        report(&table, 1, vec![of("another", api::HealthStatus::Healthy, 0)]);
        assert_eq!(table.state().drivers[D].devices.len(), DEVICES_MAX);
        for stream in 2..12 {
            let new =
                (0..DEVICES_MAX).map(|index| of(&format!("{stream}-{index}"), api::HealthStatus::Healthy, 0));
            report(&table, stream, new.collect());
            table.end(D, stream);
        }
        assert_eq!(table.state().changes.len(), CHANGES_MAX);
    }
}
