//! Rarely used fields: each is honoured or refused, never dropped.

use coracle_proto::cri;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use tonic::{Code, Request};

use crate::fixture::{Machine, container_config, security};
use crate::sh;

/// A profile that forbids one system call.
const NO_CHMOD: &str = r#"{"defaultAction": "SCMP_ACT_ALLOW", "syscalls":
    [{"names": ["chmod", "fchmod", "fchmodat", "fchmodat2"], "action": "SCMP_ACT_ERRNO"}]}"#;

#[allow(deprecated, reason = "older kubelets set it")]
fn set_profile(config: &mut cri::ContainerConfig, path: &str) {
    security(config).seccomp_profile_path = path.to_owned();
}

pub(super) async fn the_deprecated_seccomp_field_is_honoured(machine: &mut Machine) {
    let pod = machine.pod("old").await;
    let file = machine.path("no-chmod.json");
    std::fs::write(&file, NO_CHMOD).expect("write");
    let localhost = format!("localhost/{}", file.display());
    let ours = std::fs::read_to_string("/proc/self/status").expect("status");
    let ours = ours.lines().find_map(|line| line.strip_prefix("Seccomp:")).expect("mode").trim().to_owned();
    for (name, path, mode) in [
        ("silent", "", ours.as_str()),
        ("unconfined", "unconfined", &ours),
        ("default", "runtime/default", "2"),
        ("localhost", localhost.as_str(), "2"),
    ] {
        let id = machine.create(&pod, name, &["sleep", "1000"], |config| set_profile(config, path)).await;
        let id = id.expect("create");
        machine.start(&id).await;
        assert_eq!(sh(machine, &id, "awk '/^Seccomp:/ {print $2}' /proc/self/status").await, mode, "{name}");
        let may = if name == "localhost" { "no" } else { "yes" };
        let script = "touch /f; chmod 600 /f 2>/dev/null && echo yes || echo no";
        assert_eq!(sh(machine, &id, script).await, may, "{name}");
    }
    let refused = machine.create(&pod, "none", &["true"], |config| set_profile(config, "/p.json")).await;
    assert_eq!(refused.expect_err("no profile").code(), Code::InvalidArgument);
    machine.remove_pod(&pod).await;
    std::fs::remove_file(file).expect("remove");
}

pub(super) async fn unsupported_fields_are_refused(machine: &mut Machine) {
    let windows = machine.try_pod("windows", |config| config.windows = Some(Default::default())).await;
    assert_eq!(windows.expect_err("this is Linux").code(), Code::InvalidArgument);
    let pod = machine.pod("refused").await;
    let windows =
        machine.create(&pod, "windows", &["true"], |config| config.windows = Some(Default::default())).await;
    assert_eq!(windows.expect_err("this is Linux").code(), Code::InvalidArgument);
    let pages = |limit| {
        machine.create(&pod, "pages", &["true"], move |config| {
            let limits = cri::LinuxContainerResources {
                hugepage_limits: vec![cri::HugepageLimit { page_size: "2MB".into(), limit }],
                ..Default::default()
            };
            config.linux.get_or_insert_default().resources = Some(limits);
        })
    };
    let status = machine.runtime.status(Request::new(cri::StatusRequest { verbose: true })).await;
    let host = status.expect("status").into_inner().info["host"].clone();
    let hugetlb = serde_json::from_str::<serde_json::Value>(&host).expect("host")["hugetlb"] == true;
    if hugetlb {
        pages(2 << 20).await.expect("huge pages can be limited");
    } else {
        coracle_testing::skip_part!("the kernel has no hugetlb controller");
        assert_eq!(pages(2 << 20).await.expect_err("no controller").code(), Code::Unimplemented);
        pages(0).await.expect("the kubelet sends an empty limit");
    }
    machine.remove_pod(&pod).await;
}

pub(super) async fn a_privileged_container_needs_a_privileged_pod(machine: &mut Machine) {
    let privileged = |config: &mut cri::ContainerConfig| security(config).privileged = true;
    let pod = machine.pod("plain").await;
    let refused = machine.create(&pod, "c", &["true"], privileged).await.expect_err("not in this pod");
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().contains("privileged"), "{refused}");
    // A container that is added later, as for debugging, is compared with the pod's current configuration.
    let mut now = machine.pod_config("plain");
    let linux = now.linux.get_or_insert_default();
    linux.security_context.get_or_insert_default().privileged = true;
    let mut config = container_config("later", &["true"]);
    privileged(&mut config);
    let request = cri::CreateContainerRequest {
        pod_sandbox_id: pod.clone(),
        config: Some(config),
        sandbox_config: Some(now),
    };
    machine.runtime.create_container(Request::new(request)).await.expect("create");
    machine.remove_pod(&pod).await;
    let pod = machine.try_pod("privileged", |config| {
        let linux = config.linux.get_or_insert_default();
        linux.security_context.get_or_insert_default().privileged = true;
    });
    let pod = pod.await.expect("sandbox");
    machine.create(&pod, "c", &["true"], privileged).await.expect("create");
    machine.remove_pod(&pod).await;
}

pub(super) async fn unknown_enumeration_values_are_refused(machine: &mut Machine) {
    let before = machine.traces().await;
    for (network, pid, ipc) in [(4, 1, 0), (1, 1, 0), (0, 3, 0), (0, 9, 0), (0, 1, 1)] {
        let refused = machine.try_pod("modes", |config| {
            let context = config.linux.get_or_insert_default().security_context.get_or_insert_default();
            context.namespace_options =
                Some(cri::NamespaceOption { network, pid, ipc, ..Default::default() });
        });
        assert_eq!(refused.await.expect_err("no such mode").code(), Code::InvalidArgument);
    }
    assert_eq!(machine.traces().await, before);
    let pod = machine.pod("numbers").await;
    let nodes_network = |config: &mut cri::ContainerConfig| {
        let options = security(config).namespace_options.get_or_insert_default();
        options.network = cri::NamespaceMode::Node.into();
    };
    let signal = |config: &mut cri::ContainerConfig| config.stop_signal = 99;
    let last_user = |config: &mut cri::ContainerConfig| {
        security(config).run_as_user = Some(cri::Int64Value { value: i64::from(u32::MAX) });
    };
    let zero = |config: &mut cri::ContainerConfig| {
        config.envs = vec![cri::KeyValue { key: "A".into(), value: vec![0] }];
    };
    for refused in [
        machine.create(&pod, "c", &["true"], nodes_network).await,
        machine.create(&pod, "c", &["true"], signal).await,
        machine.create(&pod, "c", &["true"], last_user).await,
        machine.create(&pod, "c", &["true"], zero).await,
        machine.create(&pod, "c", &["a\0b"], |_| {}).await,
    ] {
        assert_eq!(refused.expect_err("an unknown value is refused").code(), Code::InvalidArgument);
    }
    machine.remove_pod(&pod).await;
}
