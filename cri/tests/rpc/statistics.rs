//! Metrics, statistics and status.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use coracle_proto::cri;
use coracle_proto::cri::image_service_server::ImageService;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use coracle_testing::eventually_async;
use tonic::Request;

use crate::fixture::Machine;

/// Metrics that depend on the kernel, a disk or a quota: traffic of block devices, huge pages, pressure.
const MAY_BE_ABSENT: [&str; 4] = ["_blkio_", "_hugetlb_", "_pressure_", "_fs_"];

/// Starts a container, and waits until it listens on port 99. In /proc/net/tcp, 0063 is the port and 0A the state LISTEN.
async fn start_listening(machine: &Machine, id: &str) {
    machine.start(id).await;
    let look = ["grep", "-qs", ":0063 .* 0A ", "/proc/net/tcp", "/proc/net/tcp6"];
    let listens = async || machine.exec(id, &look, 0).await.expect("exec").exit_code == 0;
    eventually_async("the container listens", 20, listens).await;
}

/// The statistics of one container. The request waits for a count of its files.
async fn stats_of(machine: &Machine, id: &str) -> cri::ContainerStats {
    let request = Request::new(cri::ContainerStatsRequest { container_id: id.to_owned() });
    let response = machine.runtime.container_stats(request).await.expect("stats").into_inner();
    response.stats.expect("stats")
}

/// Waits until the container uses at least `bytes`. The longer a measurement takes, the longer the runtime caches it.
async fn wait_for_usage(machine: &Machine, id: &str, bytes: u64) -> cri::ImageFsInfoResponse {
    eventually_async(&format!("containers use {bytes} bytes"), 20, async || {
        stats_of(machine, id).await;
        let request = Request::new(cri::ImageFsInfoRequest {});
        let info = machine.runtime.image_fs_info(request).await.expect("info").into_inner();
        let used = info.container_filesystems[0].used_bytes.as_ref().expect("bytes").value;
        (used >= bytes).then_some(info)
    })
    .await
}

fn set_limits(config: &mut cri::ContainerConfig) {
    let limits = cri::LinuxContainerResources {
        memory_limit_in_bytes: 64 << 20,
        cpu_quota: 20_000,
        cpu_period: 100_000,
        cpu_shares: 1024,
        ..Default::default()
    };
    config.linux.get_or_insert_default().resources = Some(limits);
}

pub(crate) async fn every_metric_has_a_value_and_its_labels(machine: &mut Machine) {
    let pod = machine.pod("metrics").await;
    let id = machine
        .create(&pod, "c", &["sh", "-c", "sleep 1000 & nc -l -p 99"], set_limits)
        .await
        .expect("create");
    start_listening(machine, &id).await;
    machine.exec(&id, &["sh", "-c", "dd if=/dev/zero of=/big bs=1M count=4"], 0).await.expect("exec");
    // ListPodSandboxMetrics does not wait for a count of files, so this request counts them before.
    stats_of(machine, &id).await;
    let request = Request::new(cri::ListMetricDescriptorsRequest {});
    let descriptors =
        machine.runtime.list_metric_descriptors(request).await.expect("list").into_inner().descriptors;
    let request = Request::new(cri::ListPodSandboxMetricsRequest {});
    let pods =
        machine.runtime.list_pod_sandbox_metrics(request).await.expect("list").into_inner().pod_metrics;
    assert_eq!((pods.len(), pods[0].pod_sandbox_id.as_str()), (1, pod.as_str()));
    assert_eq!(pods[0].container_metrics.len(), 1);
    let all: Vec<&cri::Metric> =
        pods[0].metrics.iter().chain(&pods[0].container_metrics[0].metrics).collect();
    let named: BTreeSet<&str> = all.iter().map(|metric| metric.name.as_str()).collect();
    let keys: BTreeMap<&str, &Vec<String>> =
        descriptors.iter().map(|descriptor| (descriptor.name.as_str(), &descriptor.label_keys)).collect();
    for metric in &all {
        assert_eq!(metric.label_values.len(), keys[metric.name.as_str()].len(), "{}", metric.name);
        assert!(metric.timestamp > 0 && metric.value.is_some(), "{}", metric.name);
    }
    for name in keys.keys().filter(|name| !MAY_BE_ABSENT.iter().any(|part| name.contains(part))) {
        assert!(named.contains(name), "{name} has no value");
    }
    let one = |name: &str| {
        let metric = all.iter().find(|metric| metric.name == name).unwrap_or_else(|| panic!("{name}"));
        metric.value.expect("value").value
    };
    assert_eq!(one("container_spec_memory_limit_bytes"), 64 << 20);
    assert_eq!(one("container_spec_cpu_quota"), 20_000);
    assert_eq!(one("container_spec_cpu_shares"), 1024);
    assert_eq!((one("container_processes"), one("container_threads")), (2, 2));
    assert_eq!(one("container_sockets"), 1);
    assert!(one("container_file_descriptors") >= 6);
    assert!(one("container_fs_usage_bytes") >= 4 << 20);
    assert!(one("container_fs_limit_bytes") > one("container_fs_usage_bytes"));
    assert!(one("container_memory_usage_bytes") <= one("container_memory_max_usage_bytes"));
    assert!(one("container_start_time_seconds") <= one("container_last_seen"));
    let label = |metric: &cri::Metric, key: &str| {
        let place = keys[metric.name.as_str()].iter().position(|known| known == key).expect(key);
        metric.label_values[place].clone()
    };
    let rss = all.iter().find(|metric| metric.name == "container_memory_rss").expect("rss");
    assert_eq!(["container", "name", "pod"].map(|key| label(rss, key)), ["c", &id, "metrics"]);
    let received = all.iter().find(|metric| metric.name == "container_network_receive_bytes_total");
    assert_eq!(label(received.expect("received"), "interface"), "eth0");
    machine.remove_pod(&pod).await;
}

pub(crate) async fn rates_and_sizes_match_the_usage(machine: &mut Machine) {
    let pod = machine.pod("rates").await;
    let half = |config: &mut cri::ContainerConfig| {
        let limits = cri::LinuxContainerResources {
            cpu_quota: 5_000,
            cpu_period: 10_000,
            memory_limit_in_bytes: 64 << 20,
            ..Default::default()
        };
        config.linux.get_or_insert_default().resources = Some(limits);
    };
    let id = machine.create(&pod, "busy", &["sh", "-c", "while :; do :; done"], half).await.expect("create");
    machine.start(&id).await;
    let stats = async || stats_of(machine, &id).await;
    let cores = |stats: &cri::ContainerStats| {
        let cpu = stats.cpu.as_ref().expect("cpu");
        cpu.usage_nano_cores.as_ref().map(|value| value.value)
    };
    assert!(cores(&stats().await).is_some(), "the first query has a value too");
    // The quota allows half a core. A busy machine gives less. After a stall the usage exceeds the quota for a moment,
    // and the kernel subtracts the excess later.
    let found = eventually_async("half a core to be used", 20, async || {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let found = stats().await;
        let used = cores(&found).expect("a rate");
        if (20_000_000..=600_000_000).contains(&used) { Ok(found) } else { Err(used) }
    })
    .await;
    let memory = found.memory.as_ref().expect("memory");
    let available = memory.available_bytes.as_ref().expect("a limit").value;
    assert_eq!(available + memory.working_set_bytes.as_ref().expect("working set").value, 64 << 20);
    assert!(memory.page_faults.as_ref().expect("faults").value > 0 && memory.rss_bytes.is_some());
    assert_eq!(found.swap.expect("swap").swap_usage_bytes.expect("usage").value, 0);
    let layer = found.writable_layer.expect("layer");
    let mount = layer.fs_id.expect("file system").mountpoint;
    assert!(std::path::Path::new(&mount).is_dir());
    machine.exec(&id, &["dd", "if=/dev/zero", "of=/big", "bs=1M", "count=3"], 0).await.expect("exec");
    let info = wait_for_usage(machine, &id, 3 << 20).await;
    let containers = &info.container_filesystems[0];
    assert_eq!(containers.fs_id.as_ref().expect("file system").mountpoint, mount);
    assert!(info.image_filesystems[0].used_bytes.as_ref().expect("bytes").value > 1 << 20);
    // An exited container keeps its size and has no CPU usage.
    machine.stop(&id, 0).await;
    let ended = stats().await.writable_layer.expect("layer");
    assert!(ended.used_bytes.expect("bytes").value >= 3 << 20);
    machine.remove_pod(&pod).await;
}

pub(crate) async fn the_runtime_describes_itself(machine: &mut Machine) {
    let request = Request::new(cri::StatusRequest { verbose: true });
    let status = machine.runtime.status(request).await.expect("status").into_inner();
    let conditions = status.status.expect("status").conditions;
    assert!(conditions.iter().any(|condition| condition.r#type == "RuntimeReady" && condition.status));
    assert!(conditions.iter().any(|condition| condition.r#type == "NetworkReady" && condition.status));
    assert!(
        status.runtime_handlers.iter().any(|handler| handler.name.is_empty() && handler.features.is_some())
    );
    // The isolation tests check each feature.
    let handler = status.runtime_handlers.first().and_then(|handler| handler.features).expect("features");
    assert_eq!(
        status.features,
        Some(cri::RuntimeFeatures {
            supplemental_groups_policy: true,
            user_namespaces_host_network: handler.user_namespaces,
            mount_options: true,
        })
    );
    for name in ["config", "host", "runtime"] {
        let info: serde_json::Value = serde_json::from_str(&status.info[name]).expect(name);
        assert!(info.is_object(), "{info}");
    }
}

async fn configure_range(machine: &Machine, pod_cidr: &str) -> Result<(), tonic::Status> {
    let network_config = Some(cri::NetworkConfig { pod_cidr: pod_cidr.to_owned() });
    let runtime_config = Some(cri::RuntimeConfig { network_config });
    let request = Request::new(cri::UpdateRuntimeConfigRequest { runtime_config });
    machine.runtime.update_runtime_config(request).await.map(drop)
}

pub(crate) async fn pods_get_addresses_from_the_configured_range(machine: &mut Machine) {
    let address = async |machine: &Machine, name: &str| {
        let pod = machine.pod(name).await;
        let network = machine.sandbox(&pod).await.network.expect("network");
        machine.remove_pod(&pod).await;
        network.ip
    };
    for refused in ["10.89.0.0/33", "here"] {
        let refused = configure_range(machine, refused).await.expect_err("no range");
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
    }
    // An empty range changes nothing.
    configure_range(machine, "").await.expect("nothing");
    let request = Request::new(cri::UpdateRuntimeConfigRequest { runtime_config: None });
    machine.runtime.update_runtime_config(request).await.expect("nothing");
    assert!(address(machine, "before").await.starts_with("10.88.0."));
    configure_range(machine, "10.89.0.0/24").await.expect("a range");
    assert!(address(machine, "after").await.starts_with("10.89.0."));
    configure_range(machine, "10.88.0.0/24").await.expect("the previous range");
    assert!(address(machine, "again").await.starts_with("10.88.0."));
}
