//! Dynamic resource allocation: prepares the ResourceClaims of pods by drivers, and gives the devices to containers.
//!
//! ```text
//! driver ──socket──► registration ──► drivers ◄── prepare, unprepare ◄── workers of pods
//!                                        │              │
//!                      ResourceSlices ◄──┘              └──► record (durable)
//! ```
//! A claim is recorded before its first call, and its record is removed after the last call. After a restart or crash
//! of the agent, a call may be repeated; calls are idempotent. A claim that several pods share is prepared once, and
//! unprepared after the last of them has ended. Source: `pkg/kubelet/cm/dra`.

mod claim;
mod device_plugin;
mod driver;
mod drivers;
mod health;
mod health_status;
mod locks;
mod record;
mod registration;
mod resources;
mod slices;
#[cfg(test)]
mod tests;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use coracle_proto::dra;
use coracle_proto::pod_resources::DynamicResource;
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};

use crate::api_health::{ApiHealth, is_unavailable};
pub(crate) use claim::ClaimError;
pub(crate) use device_plugin::{DevicePluginHandler, PluginEnd, WatchedPlugin};
pub(crate) use driver::{Caller, DriverError, Link, Version, origin};
use drivers::Drivers;
use health::HealthTable;
use locks::Locks;
use record::{Key, Record, Records};
pub(crate) use registration::open_socket;

/// Errors when the claims of a pod are prepared or unprepared.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DraError {
    #[error(transparent)]
    Claim(#[from] ClaimError),
    #[error("cannot get ResourceClaim {claim}")]
    Get {
        claim: String,
        #[source]
        source: kube::Error,
    },
    #[error("DRA driver {0} is not registered")]
    NotRegistered(String),
    /// A deleted claim with the same name is still prepared on this node. `uid` is the uid of the deleted claim. The
    /// message is upstream's (`pkg/kubelet/cm/dra`).
    #[error("old ResourceClaim with same name {name} and different UID {uid} still exists")]
    OldClaim { name: String, uid: String },
    #[error("DRA driver {driver}")]
    Driver {
        driver: String,
        #[source]
        source: DriverError,
    },
    #[error("cannot read or write the record of ResourceClaim {claim}")]
    Record {
        claim: String,
        #[source]
        source: io::Error,
    },
    #[error("the task of ResourceClaim {0} ended without a result")]
    Ended(String),
}

/// Settings of dynamic resource allocation.
#[derive(Clone, Debug)]
pub(crate) struct DraConfig {
    /// Name of the node.
    pub(crate) node: String,
    /// Directory of the registration sockets.
    pub(crate) registry: PathBuf,
    /// Directory of records.
    pub(crate) records: PathBuf,
}

/// Dynamic resource allocation on this node. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Dra {
    shared: Arc<Shared>,
}

struct Shared {
    config: DraConfig,
    client: Client,
    health: ApiHealth,
    drivers: Arc<Drivers>,
    /// The health of devices that drivers report.
    health_of_devices: Arc<HealthTable>,
    records: Records,
    /// Identifies the boot: claims are prepared again after a reboot.
    boot: String,
    /// A lock for each claim that is being prepared or unprepared.
    claims: Locks<Key>,
    /// A lock for each pod, by its uid. The tasks that prepare its claims hold it, so the end of the pod waits for a
    /// task whose caller is gone. Otherwise that task would prepare a claim after the last call that unprepares it.
    pods: Locks<String>,
}

// === impl Dra ===

impl Dra {
    /// Reads the records.
    pub(crate) fn open(config: DraConfig, client: Client, health: ApiHealth, boot: &str) -> Self {
        let shared = Shared {
            records: Records::open(config.records.clone()),
            config,
            client,
            health,
            drivers: Drivers::new(),
            health_of_devices: Arc::default(),
            boot: boot.to_owned(),
            claims: Locks::default(),
            pods: Locks::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Registers drivers and deletes slices of absent drivers, until dropped. Device plugins that register in the same
    /// directory are passed to the handler.
    pub(crate) async fn run(self, device_plugins: Arc<dyn DevicePluginHandler>) {
        let Shared { config, client, drivers, health_of_devices, .. } = &*self.shared;
        let (drivers, health) = (Arc::clone(drivers), Arc::clone(health_of_devices));
        let handlers = registration::Handlers { drivers: Arc::clone(&drivers), health, device_plugins };
        let registry = registration::Registry::new(config.registry.clone(), handlers);
        let slices = slices::run(client.clone(), config.node.clone(), drivers);
        tokio::join!(registry.run(), slices);
    }

    /// Prepares all claims of a pod. A pod without claims costs nothing.
    ///
    /// # Errors
    /// Returns the error of the first claim that fails. If a claim cannot be used, or a driver is not registered,
    /// nothing is recorded. So the pod can be deleted even if the driver never registers.
    pub(crate) async fn prepare(&self, pod: &Pod) -> Result<(), DraError> {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let used = claim::used(pod)?;
        if used.is_empty() {
            return Ok(());
        }
        let busy = Arc::new(self.shared.pods.lock(&uid.to_owned()).await);
        self.reread_all().await;
        let mut due = Vec::new();
        for used in used {
            due.extend(self.due(pod, uid, &used).await?);
        }
        let names = due.iter().flat_map(|record| record.drivers.keys());
        for driver in names {
            self.driver(driver)?;
        }
        for record in due {
            let (this, name, pod) = (self.clone(), record.name.clone(), uid.to_owned());
            let busy = Arc::clone(&busy);
            // The preparation has its own task. So the pod's deletion does not interrupt it between the call and the
            // record.
            let task = tokio::spawn(async move {
                let _busy = busy;
                this.prepare_claim(&pod, record).await
            });
            task.await.map_err(|_ended| DraError::Ended(name))??;
        }
        Ok(())
    }

    /// The record of a claim that must be prepared for a pod. None if it is prepared.
    async fn due(&self, pod: &Pod, uid: &str, used: &claim::Used) -> Result<Option<Record>, DraError> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let recorded = self.shared.records.get(&Key::new(namespace, &used.name));
        let recorded = recorded.filter(|record| record.pods.contains(uid));
        if recorded.as_ref().is_some_and(|record| record.prepared.as_ref() == Some(&self.shared.boot)) {
            return Ok(None);
        }
        let claims: Api<ResourceClaim> = Api::namespaced(self.shared.client.clone(), namespace);
        let found = self.shared.health.request(recorded.is_some(), claims.get(&used.name)).await;
        match (found, recorded) {
            (Ok(found), _) => Ok(Some(claim::admit(pod, used, &found)?)),
            // An earlier check has allowed the pod to use the claim.
            (Err(error), Some(recorded)) if is_unavailable(&error) => Ok(Some(recorded)),
            (Err(source), _) => Err(DraError::Get { claim: used.name.clone(), source }),
        }
    }

    async fn prepare_claim(&self, pod: &str, claim: Record) -> Result<(), DraError> {
        let _one_at_a_time = self.shared.claims.lock(&claim.key()).await;
        self.reread(&claim).await?;
        let known = self.shared.records.get(&claim.key());
        if let Some(old) = known.as_ref().filter(|known| known.uid != claim.uid) {
            return Err(DraError::OldClaim { name: claim.name, uid: old.uid.clone() });
        }
        let mut record = known.unwrap_or(claim);
        record.pods.insert(pod.to_owned());
        self.write(record.clone()).await?;
        if record.prepared.as_ref() == Some(&self.shared.boot) {
            return Ok(());
        }
        let drivers: Vec<String> = record.drivers.keys().cloned().collect();
        for driver in drivers {
            let prepared = self.driver(&driver)?.prepare(reference(&record)).await;
            let devices = prepared.map_err(failed(&driver))?;
            record.drivers.insert(driver, devices);
        }
        record.prepared = Some(self.shared.boot.clone());
        tracing::debug!(claim = record.name, namespace = record.namespace, "claim prepared");
        self.write(record).await
    }

    /// The CDI ids of the devices that a container gets.
    ///
    /// # Errors
    /// When a claim of the container is not prepared.
    pub(crate) fn devices(&self, pod: &Pod, container: &Container) -> Result<Vec<String>, ClaimError> {
        self.shared.records.with(|records| claim::devices(pod, container, |key| records.get(key)))
    }

    /// The prepared claims of a container, for the pod resources API.
    pub(crate) fn resources(&self, pod: &Pod, container: &Container) -> Vec<DynamicResource> {
        self.shared.records.with(|records| resources::of_container(pod, container, |key| records.get(key)))
    }

    /// Unprepares the claims that only this pod uses. Does nothing if there are none.
    ///
    /// # Errors
    /// The error of the first claim that fails. The other claims are unprepared, and another call continues.
    pub(crate) async fn unprepare(&self, pod: &str) -> Result<(), DraError> {
        let _idle = self.shared.pods.lock(&pod.to_owned()).await;
        self.reread_all().await;
        let mut result = Ok(());
        for key in self.shared.records.of_pod(pod) {
            let (this, name, uid) = (self.clone(), key.name.clone(), pod.to_owned());
            let task = tokio::spawn(async move { this.unprepare_claim(&uid, &key).await });
            let done = task.await.unwrap_or_else(|_ended| Err(DraError::Ended(name)));
            result = result.and(done);
        }
        result
    }

    async fn unprepare_claim(&self, pod: &str, key: &Key) -> Result<(), DraError> {
        let _one_at_a_time = self.shared.claims.lock(key).await;
        let Some(mut record) = self.shared.records.get(key) else { return Ok(()) };
        if record.pods.iter().any(|other| other != pod) {
            record.pods.remove(pod);
            return self.write(record).await;
        }
        for driver in record.drivers.keys().filter(|driver| !record.skips_unprepare.contains(*driver)) {
            let unprepared = self.driver(driver)?.unprepare(reference(&record)).await;
            unprepared.map_err(failed(driver))?;
        }
        tracing::debug!(claim = record.name, namespace = record.namespace, "claim unprepared");
        let (shared, name) = (Arc::clone(&self.shared), record.name.clone());
        blocking(name, move || shared.records.remove(&record)).await
    }

    /// Whether a claim may be prepared for the pod. While this is true, the end of the pod must not be reported.
    pub(crate) fn holds(&self, pod: &str) -> bool {
        self.shared.records.has_pod(pod)
    }

    /// The uids of all pods with claims.
    pub(crate) fn pods(&self) -> Vec<String> {
        self.shared.records.pods()
    }

    fn driver(&self, name: &str) -> Result<Caller, DraError> {
        self.shared.drivers.get(name).ok_or_else(|| DraError::NotRegistered(name.to_owned()))
    }

    /// Reads the records that could not be read at the start. An error is not returned: a record that is still
    /// unreadable must not block pods without its claim.
    async fn reread_all(&self) {
        if !self.shared.records.is_complete() {
            let shared = Arc::clone(&self.shared);
            // Ignore the error: it only means that the task panicked. Rust has already reported the panic on standard
            // error.
            let _ended = coracle_threads::spawn_blocking(move || shared.records.reread_all()).await;
        }
    }

    /// Reads the record of a claim again, if it could not be read at the start. The new record must keep the other pods
    /// of the claim.
    async fn reread(&self, claim: &Record) -> Result<(), DraError> {
        if self.shared.records.is_complete() {
            return Ok(());
        }
        let (shared, uid) = (Arc::clone(&self.shared), claim.uid.clone());
        blocking(claim.name.clone(), move || shared.records.reread(&uid)).await
    }

    async fn write(&self, record: Record) -> Result<(), DraError> {
        let (shared, name) = (Arc::clone(&self.shared), record.name.clone());
        blocking(name, move || shared.records.put(&record)).await
    }
}

async fn blocking(
    claim: String,
    work: impl FnOnce() -> io::Result<()> + Send + 'static,
) -> Result<(), DraError> {
    let done =
        coracle_threads::spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)));
    done.map_err(|source| DraError::Record { claim, source })
}

fn failed(driver: &str) -> impl FnOnce(DriverError) -> DraError + use<> {
    let driver = driver.to_owned();
    move |source| DraError::Driver { driver, source }
}

fn reference(record: &Record) -> dra::Claim {
    dra::Claim { namespace: record.namespace.clone(), uid: record.uid.clone(), name: record.name.clone() }
}
