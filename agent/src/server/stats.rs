//! Usage of the node and its containers, from the kernel and the runtime.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;

use coracle_proto::cri::{ContainerStats, ListContainerStatsRequest, UInt64Value};
use http::{Response, StatusCode};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::backend::Backend;
use super::respond::{Refused, json, typed};
use crate::runtime::Body;

/// Usage of one container, with its pod.
struct ContainerUsage {
    pod: [String; 3],
    container: String,
    stats: ContainerStats,
}

async fn used(backend: &Backend) -> Result<Vec<ContainerUsage>, Refused> {
    let listed = backend.runtime.list_container_stats(ListContainerStatsRequest::default()).await;
    let listed = listed.map_err(|status| Refused::by_runtime(&status))?;
    let named = listed.stats.into_iter().filter_map(|stats| {
        let labels = &stats.attributes.as_ref()?.labels;
        let label = |name: &str| labels.get(name).cloned();
        let pod = [
            label("io.kubernetes.pod.namespace")?,
            label("io.kubernetes.pod.name")?,
            label("io.kubernetes.pod.uid")?,
        ];
        Some(ContainerUsage { pod, container: label("io.kubernetes.container.name")?, stats })
    });
    Ok(named.collect())
}

/// `/stats/summary`: usage of the node, and of each pod's containers.
pub(super) async fn summary(backend: &Backend) -> Response<Body> {
    let all = match used(backend).await {
        Ok(all) => all,
        Err(refused) => return refused.answer(),
    };
    json(&summary_of(backend.access.node(), &all, &Node::now(), &Timestamp::now().to_string()))
}

fn summary_of(node_name: &str, all: &[ContainerUsage], node: &Node, time: &str) -> Value {
    let mut pods: BTreeMap<&[String; 3], Vec<Value>> = BTreeMap::new();
    for used in all {
        pods.entry(&used.pod).or_default().push(container(used));
    }
    let pods = pods.into_iter().map(|([namespace, name, uid], containers)| {
        json!({"podRef": {"name": name, "namespace": namespace, "uid": uid}, "containers": containers})
    });
    json!({
        "node": {
            "nodeName": node_name,
            "cpu": {"time": time, "usageCoreNanoSeconds": node.cpu_nanos},
            // Clients read all these fields without a check: Kubernetes' suite fails without rssBytes.
            "memory": {
                "time": time,
                "availableBytes": node.memory_available,
                "usageBytes": node.memory_usage,
                "workingSetBytes": node.memory_used,
                "rssBytes": node.memory_rss,
                "pageFaults": node.page_faults,
                "majorPageFaults": node.major_page_faults,
            },
        },
        "pods": pods.collect::<Vec<_>>(),
    })
}

fn container(used: &ContainerUsage) -> Value {
    let number = |value: Option<UInt64Value>| value.map(|value| value.value);
    let (cpu, memory) = (used.stats.cpu.unwrap_or_default(), used.stats.memory.unwrap_or_default());
    json!({
        "name": used.container,
        "cpu": {"time": time(cpu.timestamp), "usageNanoCores": number(cpu.usage_nano_cores), "usageCoreNanoSeconds": number(cpu.usage_core_nano_seconds)},
        "memory": {
            "time": time(memory.timestamp),
            "usageBytes": number(memory.usage_bytes),
            "workingSetBytes": number(memory.working_set_bytes),
            "rssBytes": number(memory.rss_bytes),
            "availableBytes": number(memory.available_bytes),
        },
    })
}

fn time(nanos: i64) -> String {
    Timestamp::from_nanosecond(i128::from(nanos)).unwrap_or_default().to_string()
}

/// `/metrics/resource`: usage in the form that the metrics server scrapes.
pub(super) async fn resource_metrics(backend: &Backend) -> Response<Body> {
    let all = match used(backend).await {
        Ok(all) => all,
        Err(refused) => return refused.answer(),
    };
    let node = Node::now();
    let mut out = String::new();
    let seconds = |nanos: u64| std::time::Duration::from_nanos(nanos).as_secs_f64();
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "# TYPE node_cpu_usage_seconds_total counter\nnode_cpu_usage_seconds_total {}",
        seconds(node.cpu_nanos)
    );
    let _ = writeln!(
        out,
        "# TYPE node_memory_working_set_bytes gauge\nnode_memory_working_set_bytes {}",
        node.memory_used
    );
    let labels = |used: &ContainerUsage| {
        format!("container=\"{}\",namespace=\"{}\",pod=\"{}\"", used.container, used.pod[0], used.pod[1])
    };
    let _ = writeln!(out, "# TYPE container_cpu_usage_seconds_total counter");
    for used in &all {
        let nanos = used
            .stats
            .cpu
            .as_ref()
            .and_then(|cpu| cpu.usage_core_nano_seconds)
            .map_or(0, |value| value.value);
        let _ = writeln!(out, "container_cpu_usage_seconds_total{{{}}} {}", labels(used), seconds(nanos));
    }
    let _ = writeln!(out, "# TYPE container_memory_working_set_bytes gauge");
    for used in &all {
        let bytes = used
            .stats
            .memory
            .as_ref()
            .and_then(|memory| memory.working_set_bytes)
            .map_or(0, |value| value.value);
        let _ = writeln!(out, "container_memory_working_set_bytes{{{}}} {bytes}", labels(used));
    }
    exposition(out)
}

/// A response in Prometheus' text format.
pub(super) fn exposition(text: String) -> Response<Body> {
    typed(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", text.into())
}

/// Usage of the whole machine.
#[derive(Debug, PartialEq, Eq)]
struct Node {
    cpu_nanos: u64,
    memory_available: u64,
    /// Memory that is not available: the working set.
    memory_used: u64,
    /// Memory that is not free. It includes the page cache.
    memory_usage: u64,
    /// Memory of processes that no file backs.
    memory_rss: u64,
    page_faults: u64,
    major_page_faults: u64,
}

impl Node {
    fn now() -> Node {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)
            .ok()
            .flatten()
            .and_then(|t| u64::try_from(t).ok());
        let files = [read("/proc/stat"), read("/proc/meminfo"), read("/proc/vmstat")];
        Node::of(files.each_ref().map(String::as_str), ticks.unwrap_or(100))
    }

    /// CPU time without idle and iowait; total memory minus available memory.
    fn of([stat, meminfo, vmstat]: [&str; 3], ticks: u64) -> Node {
        let line = stat.lines().find_map(|line| line.strip_prefix("cpu ")).unwrap_or_default();
        let fields: Vec<u64> = line.split_whitespace().map(|field| field.parse().unwrap_or(0)).collect();
        // user nice system idle iowait irq softirq steal; user includes the guest time.
        let busy: u64 = [0, 1, 2, 5, 6].iter().filter_map(|at| fields.get(*at)).sum();
        let bytes = |name: &str| crate::node::kib(meminfo, name) * 1024;
        let (total, available) = (bytes("MemTotal"), bytes("MemAvailable"));
        let count = |name: &str| {
            let mut fields = vmstat.lines().filter_map(|line| line.split_once(' '));
            fields.find(|(field, _)| *field == name).and_then(|(_, count)| count.parse().ok()).unwrap_or(0)
        };
        Node {
            cpu_nanos: busy * (1_000_000_000 / ticks),
            memory_available: available,
            memory_used: total.saturating_sub(available),
            memory_usage: total.saturating_sub(bytes("MemFree")),
            memory_rss: bytes("AnonPages"),
            page_faults: count("pgfault"),
            major_page_faults: count("pgmajfault"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_the_name_of_the_node_and_the_containers_of_each_pod() {
        let usage = |name: &str| ContainerUsage {
            pod: ["n", "p", "u"].map(str::to_owned),
            container: name.to_owned(),
            stats: ContainerStats::default(),
        };
        let node = Node { memory_used: 3, memory_rss: 1, ..Node::of(["", "", ""], 100) };
        let summary = summary_of("node-7", &[usage("a"), usage("b")], &node, "2026-01-01T00:00:00Z");
        assert_eq!(summary["node"]["nodeName"], "node-7");
        assert_eq!(summary["node"]["memory"]["workingSetBytes"], 3);
        let read_by_clients =
            [("cpu", "usageCoreNanoSeconds"), ("memory", "usageBytes"), ("memory", "rssBytes")];
        for (resource, field) in read_by_clients {
            assert!(summary["node"][resource][field].is_u64(), "{field}");
        }
        assert_eq!(summary["pods"][0]["podRef"], json!({"namespace": "n", "name": "p", "uid": "u"}));
        let names = ["a", "b"].map(|name| json!(name));
        let containers = summary["pods"][0]["containers"].as_array().unwrap();
        assert!(containers.iter().map(|container| &container["name"]).eq(&names), "{summary}");
    }

    #[test]
    fn usage_of_the_machine_is_read_from_its_files() {
        let stat = "cpu  10 1 5 1000 7 2 2 0 3 0\ncpu0 1 1 1 1\n";
        let meminfo = "MemTotal: 100 kB\nMemFree: 40 kB\nMemAvailable: 60 kB\nAnonPages: 10 kB\n";
        let vmstat = "pgfault 9\npgmajfault 2\n";
        let expected = Node {
            cpu_nanos: 200_000_000,
            memory_available: 61_440,
            memory_used: 40_960,
            memory_usage: 61_440,
            memory_rss: 10_240,
            page_faults: 9,
            major_page_faults: 2,
        };
        assert_eq!(Node::of([stat, meminfo, vmstat], 100), expected);
    }
}
