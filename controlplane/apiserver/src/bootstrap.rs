//! The objects that every cluster contains from the start: namespaces, roles, and the Service `kubernetes` of this
//! server.

mod addresses;
mod policy;
mod rbac;
mod upkeep;

use std::sync::Arc;

use coracle_kinds::{Resource, kind::by_resource};
use serde_json::{Value, json};

use crate::{
    admit::priority,
    call::Call,
    error::{ApiError, Result},
    field_manager::Writer,
    state::State,
    write::{self, Part},
};

const NAMESPACES: [&str; 4] = ["default", "kube-system", "kube-public", "kube-node-lease"];
/// Name of the ServiceCIDR with the configured ranges.
const DEFAULT_RANGE: &str = "kubernetes";

/// Creates the missing objects, and writes the address of this server.
pub(crate) async fn run(state: &Arc<State>) -> Result<()> {
    namespaces(state).await?;
    rbac::run(state).await?;
    priority_classes(state).await?;
    local_class(state).await?;
    extension_authentication(state).await?;
    token_tracking(state).await?;
    // Admission may refuse changes of existing objects. The server starts anyway, and retries the changes later.
    let range = default_range(state).await;
    if let Err(error) = &range {
        tracing::warn!(%error, "cannot write the default ServiceCIDR");
    }
    warn_of_other_ranges(state)?;
    own_service(state).await?;
    if let Err(error) = restore_own_service(state).await {
        tracing::warn!(%error, "cannot restore the service of the API server");
    }
    cluster_dns(state).await?;
    publish_address(state).await?;
    upkeep::start(state, range.is_ok())
}

/// Writes the address of this server. With a shared store a failure does not end the start, because the write is
/// repeated. For example, an etcd whose database is full refuses the registration, but not the deletions that make
/// space.
async fn publish_address(state: &Arc<State>) -> Result<()> {
    let published = addresses::publish(state).await;
    if !state.store.is_shared() {
        return published;
    }
    if let Err(error) = published {
        tracing::warn!(%error, "cannot register the address of this server yet");
    }
    coracle_threads::spawn(addresses::keep(state.clone()));
    Ok(())
}

/// Creates the missing default namespaces. An error of one namespace does not prevent the creation of the others.
async fn namespaces(state: &Arc<State>) -> Result<()> {
    let mut outcome = Ok(());
    for name in NAMESPACES {
        let metadata = json!({"name": name});
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata});
        outcome = outcome.and(ensure(state, "namespaces", object).await);
    }
    outcome
}

/// Creates the service of this server.
async fn own_service(state: &Arc<State>) -> Result<()> {
    ensure(state, "services", own_service_object(state)).await
}

/// Restores the ports and the type of the service of this server. As upstream, this happens only at the start. Source:
/// `pkg/controlplane/controller/kubernetesservice`.
async fn restore_own_service(state: &Arc<State>) -> Result<()> {
    const FIELDS: [&str; 2] = ["ports", "type"];
    let (kind, object) = (core("services")?, own_service_object(state));
    let is_default = |found: &Value| FIELDS.iter().all(|field| found["spec"][field] == object["spec"][field]);
    if stored(state, kind, &object).is_none_or(|found| is_default(&found)) {
        return Ok(());
    }
    let call = Call::internal(state, kind.clone(), &object);
    let written = write::update(&call, write::text(&object, "name"), Part::Main, Writer::Update, |old| {
        let mut new = old.clone();
        for field in FIELDS {
            new["spec"][field] = object["spec"][field].clone();
        }
        Ok(new)
    });
    written.await.map(|_| ())
}

/// The service of this server.
fn own_service_object(state: &State) -> Value {
    let labels = json!({"component": "apiserver", "provider": "kubernetes"});
    let metadata = json!({"name": "kubernetes", "namespace": "default", "labels": labels});
    let ports =
        json!([{"name": "https", "port": 443, "protocol": "TCP", "targetPort": state.advertise.port()}]);
    let address = state.allocator.ranges.primary().own().map(|address| address.to_string());
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": metadata,
        "spec": {"type": "ClusterIP", "clusterIP": address, "ports": ports, "sessionAffinity": "None"},
    })
}

/// Creates the ServiceCIDR of the configured ranges, and makes it ready before the first service needs an address. A
/// second range is added to an existing ServiceCIDR. Other ranges are kept, because services may have addresses in
/// them. Source: `pkg/controlplane/controller/defaultservicecidr`.
async fn default_range(state: &Arc<State>) -> Result<()> {
    let (kind, object) = (range_kind()?, range_object(state));
    ensure_kind(state, kind, object.clone()).await?;
    let call = Call::internal(state, kind.clone(), &object);
    // Skip the write if the object is already correct: admission could refuse it.
    let found = stored(state, kind, &object).unwrap_or_default();
    let ranges = &object["spec"]["cidrs"];
    if is_extended(&found["spec"]["cidrs"], ranges) {
        let extended = write::update(&call, DEFAULT_RANGE, Part::Main, Writer::Update, |old| {
            let mut new = old.clone();
            if is_extended(&old["spec"]["cidrs"], ranges) {
                new["spec"]["cidrs"] = ranges.clone();
            }
            Ok(new)
        });
        extended.await?;
    }
    if !lacks_status(&found) {
        return Ok(());
    }
    let written = write::update(&call, DEFAULT_RANGE, Part::Status, Writer::Update, |old| {
        let mut new = old.clone();
        if lacks_status(old) {
            let condition = json!({"type": "Ready", "status": "True", "reason": "",
                "message": "Kubernetes Service CIDR is ready", "lastTransitionTime": write::now()});
            new["status"] = json!({"conditions": [condition]});
        }
        Ok(new)
    });
    written.await.map(|_| ())
}

fn range_kind() -> Result<&'static Arc<Resource>> {
    by_resource("networking.k8s.io", "v1", "servicecidrs").ok_or_else(ApiError::no_resource)
}

/// The ServiceCIDR of the configured ranges.
fn range_object(state: &State) -> Value {
    let ranges: Vec<String> = state.allocator.ranges.iter().map(|range| range.to_string()).collect();
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": {"name": DEFAULT_RANGE},
        "spec": {"cidrs": ranges},
    })
}

/// Whether a ServiceCIDR lacks the condition `Ready` and is not being deleted.
fn lacks_status(range: &Value) -> bool {
    let mut conditions = range["status"]["conditions"].as_array().into_iter().flatten();
    conditions.all(|condition| condition["type"] != "Ready")
        && range["metadata"]["deletionTimestamp"].is_null()
}

/// Logs a difference between the setting and the default ServiceCIDR.
fn warn_of_other_ranges(state: &State) -> Result<()> {
    let object = range_object(state);
    let found = stored(state, range_kind()?, &object).unwrap_or_default();
    let (ranges, cidrs) = (&object["spec"]["cidrs"], &found["spec"]["cidrs"]);
    if cidrs != ranges {
        tracing::warn!(%ranges, %cidrs, "the default ServiceCIDR has other ranges than the setting");
    }
    Ok(())
}

/// Whether the setting adds a second range to a single-stack ServiceCIDR.
fn is_extended(stored: &Value, ranges: &Value) -> bool {
    let ranges = ranges.as_array().map_or(&[][..], Vec::as_slice);
    ranges.len() == 2 && *stored == json!([ranges[0]])
}

/// Creates the service of cluster DNS. The nodes themselves answer at the address of this service. The service only
/// reserves the address.
async fn cluster_dns(state: &Arc<State>) -> Result<()> {
    /// Number of the address in the service range, as in clusters of kubeadm.
    const DNS_ADDRESS_NUMBER: u128 = 10;
    let Some(address) = state.allocator.ranges.primary().nth(DNS_ADDRESS_NUMBER) else { return Ok(()) };
    let labels = json!({"k8s-app": "kube-dns", "kubernetes.io/cluster-service": "true",
        "kubernetes.io/name": "CoreDNS"});
    let ports = json!([{"name": "dns", "port": 53, "protocol": "UDP", "targetPort": 53},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP", "targetPort": 53}]);
    let service = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": labels},
        "spec": {"type": "ClusterIP", "clusterIP": address.to_string(), "ports": ports, "sessionAffinity": "None"},
    });
    match ensure(state, "services", service).await {
        // Another service may already have the address, for example from an earlier version of the cluster.
        Err(error) if error.reason == "Invalid" => {
            tracing::warn!(%address, error = error.message, "another service has the address of cluster DNS");
            Ok(())
        }
        made => made,
    }
}

/// Creates the system priority classes.
async fn priority_classes(state: &Arc<State>) -> Result<()> {
    let kind = by_resource("scheduling.k8s.io", "v1", "priorityclasses").ok_or_else(ApiError::no_resource)?;
    for (name, value, description) in priority::SYSTEM {
        let object = json!({
            "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": value,
            "description": description,
        });
        ensure_kind(state, kind, object).await?;
    }
    Ok(())
}

/// Creates the default storage class for local volumes. An existing class is not changed.
async fn local_class(state: &Arc<State>) -> Result<()> {
    let kind = by_resource("storage.k8s.io", "v1", "storageclasses").ok_or_else(ApiError::no_resource)?;
    let annotations = json!({"storageclass.kubernetes.io/is-default-class": "true"});
    let class = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass",
        "metadata": {"name": "local-path", "annotations": annotations},
        "provisioner": "coracle.dev/local-path", "reclaimPolicy": "Delete",
        "volumeBindingMode": "WaitForFirstConsumer", "allowVolumeExpansion": true,
    });
    ensure_kind(state, kind, class).await
}

/// Writes the config map with the certificate authorities, if one of them has changed. Aggregated servers read it to
/// authenticate clients and this server. While config maps cannot be decrypted, nothing is written; [`upkeep`] calls
/// this function again when the config maps are loaded.
async fn extension_authentication(state: &Arc<State>) -> Result<()> {
    let Some(map) = authentication_map(state) else { return Ok(()) };
    let kind = core("configmaps")?;
    if !has_config_maps(state) {
        return Ok(());
    }
    if stored(state, kind, &map).is_some_and(|stored| stored["data"] == map["data"]) {
        return Ok(());
    }
    ensure_kind(state, kind, map.clone()).await?;
    let call = Call::internal(state, kind.clone(), &map);
    let written = write::update(&call, write::text(&map, "name"), Part::Main, Writer::Update, |old| {
        let mut new = old.clone();
        if let Some(new) = new.as_object_mut() {
            new.insert("data".to_owned(), map["data"].clone());
        }
        Ok(new)
    });
    written.await.map(|_| ())
}

/// Creates the config map of [`extension_authentication`] if it does not exist.
async fn missing_extension_authentication(state: &Arc<State>) -> Result<()> {
    match authentication_map(state) {
        Some(map) => ensure_config_map(state, map).await,
        None => Ok(()),
    }
}

/// The config map with the authorities of this server. `None` without an authority of the front proxy.
fn authentication_map(state: &State) -> Option<Value> {
    let proxy = &state.front_proxy;
    if proxy.authority.is_empty() {
        return None;
    }
    let data = json!({
        "client-ca-file": proxy.client_authority,
        "requestheader-allowed-names": "[\"front-proxy-client\"]",
        "requestheader-client-ca-file": proxy.authority,
        "requestheader-extra-headers-prefix": "[\"X-Remote-Extra-\"]",
        "requestheader-group-headers": "[\"X-Remote-Group\"]",
        "requestheader-uid-headers": "[\"X-Remote-Uid\"]",
        "requestheader-username-headers": "[\"X-Remote-User\"]",
    });
    let metadata = json!({"name": "extension-apiserver-authentication", "namespace": "kube-system"});
    Some(json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}))
}

/// Creates the config map with the day since which the uses of legacy tokens are recorded. kube-controller-manager
/// reads it before it removes unused tokens.
async fn token_tracking(state: &Arc<State>) -> Result<()> {
    let metadata =
        json!({"name": "kube-apiserver-legacy-service-account-token-tracking", "namespace": "kube-system"});
    let since = jiff::Timestamp::now().strftime("%Y-%m-%d").to_string();
    let map =
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"since": since}});
    ensure_config_map(state, map).await
}

/// Creates a config map if it does not exist. While config maps cannot be decrypted, nothing is created; [`upkeep`]
/// repeats the attempt when the config maps are loaded.
async fn ensure_config_map(state: &Arc<State>, map: Value) -> Result<()> {
    match has_config_maps(state) {
        true => ensure(state, "configmaps", map).await,
        false => Ok(()),
    }
}

/// Whether the config maps are loaded. False while they cannot be decrypted.
fn has_config_maps(state: &State) -> bool {
    core("configmaps").is_ok_and(|kind| state.cache.check_readable(kind).is_ok())
}

async fn ensure(state: &Arc<State>, resource: &str, object: Value) -> Result<()> {
    ensure_kind(state, core(resource)?, object).await
}

/// Creates an object if it does not exist. Does not write an existing object: admission webhooks could refuse the
/// write.
async fn ensure_kind(state: &Arc<State>, kind: &Arc<Resource>, object: Value) -> Result<()> {
    if stored(state, kind, &object).is_some() {
        return Ok(());
    }
    let call = Call::internal(state, kind.clone(), &object);
    match write::create(&call, object, Writer::Update).await {
        Err(error) if error.reason != "AlreadyExists" => Err(error),
        _ => Ok(()),
    }
}

/// The stored object with the name of `object`.
fn stored(state: &State, kind: &Resource, object: &Value) -> Option<Value> {
    let found = state.cache.get(kind, write::text(object, "namespace"), write::text(object, "name"))?;
    Some(found.value())
}

/// A kind of the core group.
fn core(resource: &str) -> Result<&'static Arc<Resource>> {
    by_resource("", "v1", resource).ok_or_else(ApiError::no_resource)
}
