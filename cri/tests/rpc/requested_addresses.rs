//! Addresses that pods request by annotations.

use coracle_proto::cri;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use tonic::{Code, Request, Status};

use crate::fixture::Machine;

async fn asking(
    machine: &Machine,
    name: &str,
    annotations: &[(&str, &str)],
    network: cri::NamespaceMode,
) -> Result<String, Status> {
    let asked = annotations.iter().map(|(name, value)| (format!("cni.coracle/{name}"), (*value).to_owned()));
    let change = |config: &mut cri::PodSandboxConfig| {
        config.annotations.extend(asked);
        let context = config.linux.get_or_insert_default().security_context.get_or_insert_default();
        context.namespace_options.get_or_insert_default().set_network(network);
    };
    machine.try_pod(name, change).await
}

pub(crate) async fn a_pod_gets_the_addresses_that_it_requests(machine: &mut Machine) {
    let asked = [("ips", "10.88.0.200"), ("mac", "0a:00:00:00:02:00")];
    let first = asking(machine, "first", &asked, cri::NamespaceMode::Pod).await.expect("a pod");
    assert_eq!(machine.sandbox(&first).await.network.expect("network").ip, "10.88.0.200");
    let netns = format!("--net=/proc/{}/ns/net", machine.shim_pid(&first).await);
    let inside = std::process::Command::new("nsenter").args([&netns, "ip", "addr", "show", "eth0"]).output();
    let inside = String::from_utf8(inside.expect("ip").stdout).expect("text");
    assert!(inside.contains("inet 10.88.0.200/") && inside.contains("0a:00:00:00:02:00"), "{inside}");
    // The addresses stay reserved after a restart.
    machine.restart(std::time::Duration::ZERO).await;
    let before = machine.traces().await;
    for (annotation, message) in [
        (("ips", "10.88.0.200"), "annotations: address 10.88.0.200 is used by the pod default/first"),
        (
            ("mac", "0a:00:00:00:02:00"),
            "annotations: hardware address 0a:00:00:00:02:00 is used by the pod default/first",
        ),
        (("ips", "192.0.2.1"), "annotations: ips: 192.0.2.1 is in no range of the network: 10.88.0.0/24"),
        (("ips", "10.88.0.1"), "annotations: ips: 10.88.0.1 is the gateway of 10.88.0.0/24"),
        (("ips", "10.88.0"), "annotations: cni.coracle/ips: \"10.88.0\" is not an IP address"),
        (
            ("mac", "01:00:00:00:02:00"),
            "annotations: cni.coracle/mac: 01:00:00:00:02:00 is a multicast address",
        ),
    ] {
        let refused = asking(machine, "second", &[annotation], cri::NamespaceMode::Pod).await;
        let refused = refused.expect_err(message);
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().starts_with(message), "{refused}");
        assert_eq!(machine.traces().await, before, "{message}");
    }
    let in_another_namespace = |config: &mut cri::PodSandboxConfig| {
        config.annotations.insert("cni.coracle/ips".to_owned(), "10.88.0.200".to_owned());
        config.metadata.get_or_insert_default().namespace = "other".to_owned();
    };
    let refused = machine.try_pod("second", in_another_namespace).await.expect_err("the address is taken");
    let message = "annotations: address 10.88.0.200 is used by a pod of another namespace";
    assert!(refused.message().starts_with(message), "{refused}");
    let refused = asking(machine, "second", &asked[..1], cri::NamespaceMode::Node)
        .await
        .expect_err("a pod with the host network has no addresses");
    assert!(
        refused.code() == Code::InvalidArgument && refused.message().contains("the node's network"),
        "{refused}"
    );
    let stop = cri::StopPodSandboxRequest { pod_sandbox_id: first.clone() };
    machine.runtime.stop_pod_sandbox(Request::new(stop)).await.expect("stopped");
    let second =
        asking(machine, "second", &asked, cri::NamespaceMode::Pod).await.expect("the address is free again");
    assert_eq!(machine.sandbox(&second).await.network.expect("network").ip, "10.88.0.200");
    for pod in [first, second] {
        machine.remove_pod(&pod).await;
    }
}
