//! `/stats/summary`: usage of the node, its pods and their containers.
//!
//! The JSON format is defined in `k8s.io/kubelet/pkg/apis/stats/v1alpha1`. Unknown values are left out.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use coracle_proto::cri::{
    CpuUsage, FilesystemUsage, ImageFsInfoRequest, IoUsage, MemoryUsage, NetworkInterfaceUsage, NetworkUsage,
    PsiData, PsiStats, SwapUsage, UInt64Value,
};
use coracle_values::CollectMap;
use http::Response;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, Volume};
use serde_json::{Map, Value, json};

use super::backend::{Backend, PodDiskUsage};
use super::node_usage::{Interface, NodeUsage};
use super::pod_usage::{self, ContainerUsage, PodUsage};
use super::respond::{Refused, json as json_response, on_blocking_thread};
use crate::cgroup::Cgroups;
use crate::cgroup::usage::CgroupUsage;
use crate::runtime::Body;
use crate::volume::{ClaimName, FileSystem};

/// The interface that the kubelet reports as the node's interface.
const DEFAULT_INTERFACE: &str = "eth0";
/// Bytes of a block of a file's usage (stat(2)).
const BLOCK: u64 = 512;
/// Maximum log files of a container that are counted. The runtime keeps a few.
const LOG_FILES: usize = 1000;
/// Fields that are left out of a summary of processor and memory only.
const OTHER_FIELDS: [&str; 8] =
    ["network", "fs", "runtime", "rlimit", "rootfs", "logs", "process_stats", "volume"];

/// The values of one summary.
#[derive(Default)]
struct Read {
    node_name: String,
    state_dir: PathBuf,
    /// The directory of container logs. None if the logs are not measured.
    log_dir: Option<PathBuf>,
    usage: Vec<PodUsage>,
    /// The pods that the node has to run, by their uids.
    desired: HashMap<String, Arc<Pod>>,
    claims: BTreeMap<ClaimName, FileSystem>,
    /// The disk usage of pods, by their uids.
    storage: HashMap<String, PodDiskUsage>,
    /// The file systems of images and of writable layers.
    image_fs: [Option<FilesystemUsage>; 2],
    /// Usage of the agent's cgroup and of the cgroup of all pods.
    cgroups: [Option<CgroupUsage>; 2],
    node: NodeUsage,
    time: String,
}

/// Answers a request. With `is_brief`, the answer has only processor and memory.
pub(super) async fn answer(backend: &Backend, is_brief: bool) -> Response<Body> {
    let usage = match pod_usage::read(&*backend.runtime).await {
        Ok(usage) => usage,
        Err(error) => return Refused::by_runtime(&error).answer(),
    };
    let mut read = Read {
        node_name: backend.access.node().to_owned(),
        state_dir: backend.state_dir.clone(),
        usage,
        ..Read::default()
    };
    if !is_brief {
        let pods = backend.pods.pods();
        read.log_dir = Some(backend.log_dir.clone());
        read.desired = by_uid(&pods);
        if let Some(usages) = &backend.disk_usages {
            read.storage = usages.of(&pods).await;
        }
        read.claims = backend.claims.of(pods).await;
        if let Ok(info) = backend.runtime.image_fs_info(ImageFsInfoRequest {}).await {
            let (images, layers) = (info.image_filesystems, info.container_filesystems);
            read.image_fs = [images.into_iter().next(), layers.into_iter().next()];
        }
    }
    let cgroups = backend.cgroups.clone();
    on_blocking_thread(move || {
        read.read_kernel(cgroups.as_ref());
        let mut summary = read.summary();
        if is_brief {
            remove_fields(&mut summary, &OTHER_FIELDS);
        }
        json_response(&summary)
    })
    .await
}

// === impl Read ===

impl Read {
    /// Reads the files of the kernel.
    fn read_kernel(&mut self, cgroups: Option<&Cgroups>) {
        self.node = NodeUsage::now();
        self.time = Timestamp::now().to_string();
        self.cgroups = [cgroups.and_then(Cgroups::usage_of_agent), cgroups.map(Cgroups::usage_of_pods)];
    }

    fn summary(&self) -> Value {
        let mut disks = HashMap::new();
        let pods: Vec<Value> = self.usage.iter().map(|pod| self.pod(pod, &mut disks)).collect();
        without_nulls(json!({"node": self.node(&mut disks), "pods": pods}))
    }

    fn node(&self, disks: &mut Disks) -> Value {
        let (node, time) = (&self.node, &self.time);
        let [images, layers] = &self.image_fs;
        let mut disk =
            |usage: &Option<FilesystemUsage>| usage.as_ref().map(|usage| file_system(usage, disks));
        let (images, layers) = (disk(images), disk(layers));
        let system = ["kubelet", "pods"].into_iter().zip(&self.cgroups);
        let system = system.filter_map(|(name, usage)| Some(self.system_container(name, usage.as_ref()?)));
        json!({
            "nodeName": self.node_name,
            "startTime": Timestamp::from_second(node.booted).ok().map(|time| time.to_string()),
            "cpu": {"time": time, "usageCoreNanoSeconds": node.cpu_nanos},
            "memory": {
                "time": time,
                "availableBytes": node.memory_available,
                "usageBytes": node.memory_used,
                "workingSetBytes": node.memory_working_set,
                "rssBytes": node.memory_anonymous,
            },
            "swap": {"time": time, "swapAvailableBytes": node.swap_available, "swapUsageBytes": node.swap_used},
            "network": node_network(&node.interfaces, time),
            "fs": FileSystem::at(&self.state_dir).map(|disk| fields_of(&disk, time)),
            "runtime": {"imageFs": images, "containerFs": layers},
            "rlimit": {"time": time, "maxpid": node.max_processes, "curproc": node.processes},
            "systemContainers": system.collect::<Vec<_>>(),
        })
    }

    fn system_container(&self, name: &str, usage: &CgroupUsage) -> Value {
        let time = &self.time;
        let created = usage.created.and_then(|created| {
            let since_epoch = created.duration_since(SystemTime::UNIX_EPOCH).ok()?;
            Some(Timestamp::from_second(i64::try_from(since_epoch.as_secs()).ok()?).ok()?.to_string())
        });
        let memory = usage.memory.map(|memory| {
            json!({
                "time": time,
                "usageBytes": memory.usage,
                "workingSetBytes": memory.working_set,
                "rssBytes": memory.rss,
                "pageFaults": memory.page_faults,
                "majorPageFaults": memory.major_page_faults,
            })
        });
        json!({
            "name": name,
            "startTime": created,
            "cpu": {"time": time, "usageCoreNanoSeconds": usage.cpu_nanos},
            "memory": memory,
        })
    }

    fn pod(&self, pod: &PodUsage, disks: &mut Disks) -> Value {
        let stats = &pod.stats;
        let processes = stats.process.and_then(|process| number(process.process_count));
        let containers = pod.containers.iter().map(|one| {
            let mut fields = container(one, disks);
            fields["logs"] = json!(self.logs(pod, &one.name, disks));
            fields
        });
        let containers: Vec<Value> = containers.collect();
        json!({
            "podRef": {"name": pod.name, "namespace": pod.namespace, "uid": pod.uid},
            "startTime": time(pod.created),
            "containers": containers,
            "cpu": cpu(stats.cpu),
            "memory": memory(stats.memory),
            "io": io(stats.io),
            "network": stats.network.as_ref().map(network),
            "process_stats": processes.map(|count| json!({"process_count": count})),
            "volume": self.volumes(&pod.uid),
            "ephemeral-storage": self.storage(&pod.uid, disks),
        })
    }

    /// The space of a container's log files.
    fn logs(&self, pod: &PodUsage, container: &str, disks: &mut Disks) -> Option<Value> {
        let log_dir = self.log_dir.as_deref()?;
        let of_pod = format!("{}_{}_{}", pod.namespace, pod.name, pod.uid);
        // Another client of the runtime may use any name.
        if of_pod.contains('/') || container.contains('/') || ["", ".", ".."].contains(&container) {
            return None;
        }
        let files = std::fs::read_dir(log_dir.join(of_pod).join(container)).ok()?;
        let (mut bytes, mut inodes) = (0, 0);
        for metadata in files.take(LOG_FILES).filter_map(|file| file.ok()?.metadata().ok()) {
            bytes += metadata.blocks() * BLOCK;
            inodes += 1;
        }
        let mut fields = disk_at(log_dir, disks).map(|disk| fields_of(&disk, &self.time))?;
        fields["usedBytes"] = json!(bytes);
        fields["inodesUsed"] = json!(inodes);
        Some(fields)
    }

    /// The space that a pod takes on the node's disk. None if the space is not measured.
    fn storage(&self, uid: &str, disks: &mut Disks) -> Option<Value> {
        let measured = self.storage.get(uid)?;
        let mut fields = fields_of(&disk_at(&self.state_dir, disks)?, &measured.time.to_string());
        fields["usedBytes"] = json!(measured.bytes);
        fields["inodesUsed"] = json!(measured.inodes);
        Some(fields)
    }

    /// The usage of the pod's volumes that come from claims. None if no such volume was measured.
    fn volumes(&self, uid: &str) -> Option<Vec<Value>> {
        let pod = self.desired.get(uid)?;
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let measured = volumes.filter_map(|volume| {
            let claim = claim_name(pod, volume)?;
            let disk = self.claims.get(&(namespace.clone(), claim.clone()))?;
            let mut fields = fields_of(disk, &self.time);
            fields["name"] = volume.name.clone().into();
            fields["pvcRef"] = json!({"name": claim, "namespace": namespace});
            Some(fields)
        });
        Some(measured.collect()).filter(|volumes: &Vec<Value>| !volumes.is_empty())
    }
}

/// File systems by paths, each read once.
type Disks = HashMap<PathBuf, Option<FileSystem>>;

fn disk_at(path: &Path, disks: &mut Disks) -> Option<FileSystem> {
    match disks.get(path) {
        Some(disk) => *disk,
        None => *disks.entry(path.to_owned()).or_insert_with(|| FileSystem::at(path)),
    }
}

fn by_uid(pods: &[Arc<Pod>]) -> HashMap<String, Arc<Pod>> {
    pods.iter().filter_map(|pod| Some((pod.metadata.uid.clone()?, Arc::clone(pod)))).collect()
}

fn claim_name(pod: &Pod, volume: &Volume) -> Option<String> {
    match (&volume.persistent_volume_claim, &volume.ephemeral) {
        (Some(claim), _) => Some(claim.claim_name.clone()),
        (None, Some(_)) => Some(format!("{}-{}", pod.metadata.name.as_deref()?, volume.name)),
        (None, None) => None,
    }
}

fn container(used: &ContainerUsage, disks: &mut Disks) -> Value {
    let stats = &used.stats;
    json!({
        "name": used.name,
        "startTime": time(used.created),
        "cpu": cpu(stats.cpu),
        "memory": memory(stats.memory),
        "io": io(stats.io),
        "swap": swap(stats.swap),
        "rootfs": stats.writable_layer.as_ref().map(|layer| file_system(layer, disks)),
    })
}

fn number(value: Option<UInt64Value>) -> Option<u64> {
    value.map(|value| value.value)
}

fn time(nanos: i64) -> String {
    Timestamp::from_nanosecond(i128::from(nanos)).unwrap_or_default().to_string()
}

fn cpu(cpu: Option<CpuUsage>) -> Option<Value> {
    cpu.map(|cpu| {
        json!({
            "time": time(cpu.timestamp),
            "usageNanoCores": number(cpu.usage_nano_cores),
            "usageCoreNanoSeconds": number(cpu.usage_core_nano_seconds),
            "psi": psi(cpu.psi),
        })
    })
}

fn memory(memory: Option<MemoryUsage>) -> Option<Value> {
    memory.map(|memory| {
        json!({
            "time": time(memory.timestamp),
            "availableBytes": number(memory.available_bytes),
            "usageBytes": number(memory.usage_bytes),
            "workingSetBytes": number(memory.working_set_bytes),
            "rssBytes": number(memory.rss_bytes),
            "pageFaults": number(memory.page_faults),
            "majorPageFaults": number(memory.major_page_faults),
            "psi": psi(memory.psi),
        })
    })
}

fn io(io: Option<IoUsage>) -> Option<Value> {
    io.map(|io| json!({"time": time(io.timestamp), "psi": psi(io.psi)}))
}

fn swap(swap: Option<SwapUsage>) -> Option<Value> {
    swap.map(|swap| {
        json!({
            "time": time(swap.timestamp),
            "swapAvailableBytes": number(swap.swap_available_bytes),
            "swapUsageBytes": number(swap.swap_usage_bytes),
        })
    })
}

/// Pressure stall information.
fn psi(psi: Option<PsiStats>) -> Option<Value> {
    let data = |data: Option<PsiData>| {
        let data = data.unwrap_or_default();
        json!({"total": data.total, "avg10": data.avg10, "avg60": data.avg60, "avg300": data.avg300})
    };
    psi.map(|psi| json!({"full": data(psi.full), "some": data(psi.some)}))
}

/// The traffic of a pod: of its default interface first, then of all interfaces.
fn network(usage: &NetworkUsage) -> Value {
    let interface = |one: &NetworkInterfaceUsage| {
        json!({
            "name": one.name,
            "rxBytes": number(one.rx_bytes),
            "rxErrors": number(one.rx_errors),
            "txBytes": number(one.tx_bytes),
            "txErrors": number(one.tx_errors),
        })
    };
    let mut fields = usage.default_interface.as_ref().map_or_else(|| json!({}), interface);
    fields["time"] = time(usage.timestamp).into();
    fields["interfaces"] = usage.interfaces.iter().map(interface).collect();
    fields
}

fn node_network(interfaces: &[Interface], time: &str) -> Value {
    let interface = |one: &Interface| {
        json!({
            "name": one.name,
            "rxBytes": one.rx_bytes,
            "rxErrors": one.rx_errors,
            "txBytes": one.tx_bytes,
            "txErrors": one.tx_errors,
        })
    };
    let default = interfaces.iter().find(|one| one.name == DEFAULT_INTERFACE);
    let mut fields = default.map_or_else(|| json!({"name": ""}), interface);
    fields["time"] = time.into();
    fields["interfaces"] = interfaces.iter().map(interface).collect();
    fields
}

/// The disk usage of images or of a writable layer, with the size of their file system.
fn file_system(usage: &FilesystemUsage, disks: &mut Disks) -> Value {
    let path = usage.fs_id.as_ref().map(|id| id.mountpoint.as_str()).unwrap_or_default();
    let disk = disk_at(Path::new(path), disks);
    let time = time(usage.timestamp);
    let mut fields = disk.map_or_else(|| json!({"time": time}), |disk| fields_of(&disk, &time));
    fields["usedBytes"] = json!(number(usage.used_bytes));
    fields["inodesUsed"] = json!(number(usage.inodes_used));
    fields
}

fn fields_of(disk: &FileSystem, time: &str) -> Value {
    json!({
        "time": time,
        "availableBytes": disk.available,
        "capacityBytes": disk.capacity,
        "usedBytes": disk.used,
        "inodesFree": disk.inodes_free,
        "inodes": disk.inodes,
        "inodesUsed": disk.inodes_used,
    })
}

/// Removes fields that are null. The recursion is bounded: the depth of a summary is fixed.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields = fields.into_iter().filter(|(_, value)| !value.is_null());
            Value::Object(fields.map(|(name, value)| (name, without_nulls(value))).collect_map::<Map<_, _>>())
        }
        Value::Array(values) => values.into_iter().map(without_nulls).collect(),
        other => other,
    }
}

/// Removes fields at any depth.
fn remove_fields(value: &mut Value, names: &[&str]) {
    match value {
        Value::Object(fields) => {
            fields.retain(|name, _| !names.contains(&name.as_str()));
            fields.values_mut().for_each(|value| remove_fields(value, names));
        }
        Value::Array(values) => values.iter_mut().for_each(|value| remove_fields(value, names)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::{ContainerStats, FilesystemIdentifier, LinuxPodSandboxStats, ProcessUsage};

    use super::*;

    fn read() -> Read {
        let uint = |value| Some(UInt64Value { value });
        let interface =
            NetworkInterfaceUsage { name: "eth0".to_owned(), rx_bytes: uint(5), ..Default::default() };
        let stats = LinuxPodSandboxStats {
            cpu: Some(CpuUsage { usage_nano_cores: uint(1), ..CpuUsage::default() }),
            network: Some(NetworkUsage {
                timestamp: 0,
                default_interface: Some(interface.clone()),
                interfaces: vec![interface],
            }),
            process: Some(ProcessUsage { timestamp: 0, process_count: uint(3) }),
            ..LinuxPodSandboxStats::default()
        };
        let layer = FilesystemUsage {
            timestamp: 0,
            fs_id: Some(FilesystemIdentifier { mountpoint: "/".to_owned() }),
            used_bytes: uint(7),
            inodes_used: uint(2),
        };
        let container = ContainerUsage {
            name: "c".to_owned(),
            created: 1_000_000_000,
            stats: ContainerStats { writable_layer: Some(layer), ..ContainerStats::default() },
        };
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": [],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}, {"name": "e", "emptyDir": {}}]}});
        let disk =
            FileSystem { capacity: 9, available: 4, used: 5, inodes: 3, inodes_free: 2, inodes_used: 1 };
        let memory = crate::cgroup::usage::MemoryUsage { working_set: 8, ..Default::default() };
        let measured = PodDiskUsage { bytes: 4096, inodes: 6, time: Timestamp::UNIX_EPOCH };
        let pods = CgroupUsage { cpu_nanos: Some(6), memory: Some(memory), created: None };
        Read {
            node_name: "node-7".to_owned(),
            state_dir: PathBuf::from("/"),
            usage: vec![PodUsage {
                namespace: "n".to_owned(),
                name: "p".to_owned(),
                uid: "u".to_owned(),
                created: 0,
                stats,
                containers: vec![container],
            }],
            desired: by_uid(&[Arc::new(serde_json::from_value(pod).unwrap())]),
            claims: [(("n".to_owned(), "data".to_owned()), disk)].into(),
            storage: [("u".to_owned(), measured)].into(),
            cgroups: [None, Some(pods)],
            time: "2026-01-01T00:00:00Z".to_owned(),
            ..Read::default()
        }
    }

    #[test]
    fn a_summary_has_the_kubelets_fields() {
        let summary = read().summary();
        let node = &summary["node"];
        assert_eq!(node["nodeName"], "node-7");
        assert!(node["fs"]["capacityBytes"].as_u64().unwrap() > 0, "{node}");
        let [pods] = node["systemContainers"].as_array().unwrap().as_slice() else { panic!("{node}") };
        assert_eq!((&pods["name"], &pods["cpu"]["usageCoreNanoSeconds"]), (&json!("pods"), &json!(6)));
        assert_eq!(pods["memory"]["workingSetBytes"], 8);
        let pod = &summary["pods"][0];
        assert_eq!(pod["podRef"], json!({"namespace": "n", "name": "p", "uid": "u"}));
        assert_eq!((&pod["cpu"]["usageNanoCores"], pod.get("memory")), (&json!(1), None), "absent, not null");
        assert_eq!((&pod["network"]["name"], &pod["network"]["rxBytes"]), (&json!("eth0"), &json!(5)));
        assert_eq!(pod["process_stats"]["process_count"], 3);
        let [volume] = pod["volume"].as_array().unwrap().as_slice() else { panic!("{pod}") };
        assert_eq!((&volume["name"], &volume["usedBytes"]), (&json!("v"), &json!(5)));
        let storage = &pod["ephemeral-storage"];
        assert_eq!((&storage["usedBytes"], &storage["inodesUsed"]), (&json!(4096), &json!(6)));
        assert_eq!(storage["time"], "1970-01-01T00:00:00Z");
        assert!(storage["capacityBytes"].as_u64().unwrap() > 0, "{storage}");
        assert_eq!(volume["pvcRef"], json!({"name": "data", "namespace": "n"}));
        let container = &pod["containers"][0];
        assert_eq!(container["startTime"], "1970-01-01T00:00:01Z");
        assert_eq!(
            (&container["rootfs"]["usedBytes"], &container["rootfs"]["inodesUsed"]),
            (&json!(7), &json!(2))
        );
        assert!(container["rootfs"]["capacityBytes"].as_u64().unwrap() > 0, "{container}");
    }

    #[test]
    fn log_files_of_a_container_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let logs = dir.path().join("n_p_u/c");
        std::fs::create_dir_all(&logs).unwrap();
        std::fs::write(logs.join("0.log"), vec![b'x'; 10_000]).unwrap();
        let read = Read { log_dir: Some(dir.path().to_owned()), ..read() };
        let summary = read.summary();
        let fields = &summary["pods"][0]["containers"][0]["logs"];
        assert_eq!(fields["inodesUsed"], 1, "{fields}");
        assert!(fields["usedBytes"].as_u64().unwrap() <= 64 << 10, "{fields}");
        let mut disks = Disks::new();
        let other = PodUsage { name: "../../x".to_owned(), ..PodUsage::default() };
        assert_eq!(read.logs(&other, "c", &mut disks), None);
        assert_eq!(read.logs(&read.usage[0], ".", &mut disks), None);
        assert!(read.logs(&read.usage[0], "c", &mut disks).is_some());
        assert_eq!(disks.into_keys().collect::<Vec<_>>(), [dir.path()], "one file system for all containers");
        let brief = Read { log_dir: None, ..read };
        assert!(brief.summary()["pods"][0]["containers"][0].get("logs").is_none());
    }

    #[test]
    fn a_brief_summary_has_processor_and_memory_only() {
        let mut summary = read().summary();
        remove_fields(&mut summary, &OTHER_FIELDS);
        let pod = &summary["pods"][0];
        assert!(pod.get("cpu").is_some() && pod.get("network").is_none() && pod.get("volume").is_none());
        assert!(pod["containers"][0].get("rootfs").is_none() && summary["node"].get("fs").is_none());
    }
}
