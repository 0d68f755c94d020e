//! Adjustments of plugins, checked by the kernel's view.

use std::os::unix::fs::MetadataExt;

use coracle_proto::cri::runtime_service_server::RuntimeService;
use coracle_proto::nri::{
    CdiDevice, ContainerAdjustment, ContainerEviction, ContainerUpdate, CreateContainerResponse, Event, Hook,
    Hooks, KeyValue, LinuxContainerAdjustment, LinuxContainerUpdate, LinuxDevice, LinuxIoPriority,
    LinuxMemory, LinuxPids, LinuxResources, LinuxScheduler, LinuxSeccomp, LinuxSyscall, Mount, OptionalInt,
    OptionalInt64, OptionalString, OptionalUInt32, PosixRlimit, UpdateContainerResponse,
    UpdateContainersRequest, ValidateContainerAdjustmentResponse,
};
use prost::Message;

use crate::fixture::Machine;
use crate::plugin::{Plugin, PluginReply, ReceivedCall};

async fn sh(machine: &Machine, id: &str, script: &str) -> String {
    let answer = machine.exec(id, &["sh", "-c", script], 0).await.expect("exec");
    String::from_utf8_lossy(&answer.stdout).trim().to_owned()
}

fn variable(key: &str, value: &str) -> KeyValue {
    KeyValue { key: key.into(), value: value.into() }
}

/// Answers CreateContainer with an adjustment, and all other calls with an empty response.
fn creation(adjust: ContainerAdjustment) -> impl Fn(&ReceivedCall) -> PluginReply + Send + Sync + 'static {
    move |heard| match heard.method.as_str() {
        "CreateContainer" => PluginReply::adjust(adjust.clone()),
        _ => PluginReply::Yes,
    }
}

fn everything(machine: &Machine, cgroup: &str) -> ContainerAdjustment {
    let memory = LinuxMemory { limit: Some(OptionalInt64 { value: 64 << 20 }), ..Default::default() };
    ContainerAdjustment {
        annotations: [("seen".to_owned(), "yes".to_owned())].into(),
        args: ["sh", "-c", "sleep 1000"].map(str::to_owned).into(),
        env: vec![variable("ADDED", "1"), variable("-GONE", ""), variable("KEPT", "changed")],
        mounts: vec![Mount {
            destination: "/plugin".into(),
            r#type: "bind".into(),
            source: machine.path("given").to_string_lossy().into_owned(),
            options: ["rbind", "ro"].map(str::to_owned).into(),
        }],
        rlimits: vec![PosixRlimit { r#type: "RLIMIT_NOFILE".into(), hard: 333, soft: 222 }],
        linux: Some(LinuxContainerAdjustment {
            devices: vec![LinuxDevice {
                path: "/dev/nothing".into(),
                r#type: "c".into(),
                major: 1,
                minor: 3,
                ..Default::default()
            }],
            resources: Some(LinuxResources {
                memory: Some(memory),
                pids: Some(LinuxPids { limit: 77 }),
                ..Default::default()
            }),
            cgroups_path: cgroup.to_owned(),
            oom_score_adj: Some(OptionalInt { value: 321 }),
            io_priority: Some(LinuxIoPriority { class: 3, priority: 0 }),
            scheduler: Some(LinuxScheduler { policy: 4, ..Default::default() }),
            sysctl: [("net.ipv4.ip_default_ttl".to_owned(), "77".to_owned())].into(),
            seccomp_policy: Some(LinuxSeccomp {
                default_action: "SCMP_ACT_ALLOW".into(),
                syscalls: vec![LinuxSyscall {
                    names: ["mkdir", "mkdirat"].map(str::to_owned).into(),
                    action: "SCMP_ACT_ERRNO".into(),
                    errno_ret: Some(OptionalUInt32 { value: 1 }),
                    ..Default::default()
                }],
                ..Default::default()
            }),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// Waits for the program. The runtime detects a start by a closed descriptor, a moment before the program's arguments
/// are visible.
async fn program_runs(pid: i32) {
    let has_arguments = || !std::fs::read(format!("/proc/{pid}/cmdline")).expect("proc").is_empty();
    coracle_testing::until("the program runs", 10, has_arguments).await;
}

pub(crate) async fn an_adjustment_reaches_the_kernel(machine: &mut Machine) {
    std::fs::create_dir_all(machine.path("given")).expect("directory");
    std::fs::write(machine.path("given/file"), "from the plugin").expect("file");
    let cgroup = format!("{}/kubepods/elsewhere/c", machine.cgroup_root());
    let plugin = Plugin::join(&machine.path("nri.sock"), "10", creation(everything(machine, &cgroup))).await;
    let pod = machine.pod("adjusted").await;
    let id = machine
        .create(&pod, "c", &["true"], |config| {
            for (key, value) in [("GONE", "1"), ("KEPT", "1")] {
                let value = value.as_bytes().to_vec();
                config.envs.push(coracle_proto::cri::KeyValue { key: key.into(), value });
            }
        })
        .await
        .expect("create");
    machine.start(&id).await;
    let pid = machine.pid(&id).await;
    let proc = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).expect("proc");
    program_runs(pid).await;
    assert!(proc("cmdline").contains("sleep"));
    let environment = proc("environ");
    let variables: Vec<&str> = environment.split('\0').collect();
    assert!(variables.contains(&"ADDED=1") && variables.contains(&"KEPT=changed"), "{variables:?}");
    assert!(!environment.contains("GONE"));
    let limits = proc("limits");
    let files: Vec<&str> = limits
        .lines()
        .find(|line| line.starts_with("Max open files"))
        .expect("limit")
        .split_whitespace()
        .collect();
    assert_eq!(files[3..5], ["222", "333"]);
    assert_eq!(proc("oom_score_adj").trim(), "321");
    assert!(proc("cgroup").lines().any(|line| line.ends_with(&cgroup)), "{}", proc("cgroup"));
    // Field 41 of stat is the policy; 3 is batch.
    let stat = proc("stat");
    assert_eq!(stat.rsplit_once(") ").expect("name").1.split(' ').nth(38), Some("3"));
    let priority =
        std::process::Command::new("ionice").args(["-p", &pid.to_string()]).output().expect("ionice");
    assert_eq!(String::from_utf8_lossy(&priority.stdout).trim(), "idle");
    assert_eq!(memory_limit(machine, &id).await, (64 << 20).to_string());
    assert_eq!(limit(pid, "pids", ["pids.max"; 2]), "77");
    assert_eq!(
        sh(machine, &id, "cat /plugin/file; touch /plugin/x || echo read-only").await,
        "from the pluginread-only"
    );
    assert_eq!(sh(machine, &id, "cat /proc/sys/net/ipv4/ip_default_ttl; echo $ADDED").await, "77\n1");
    assert_eq!(sh(machine, &id, "mkdir /tmp/x || echo forbidden").await, "forbidden");
    let device = std::fs::metadata(format!("/proc/{pid}/root/dev/nothing")).expect("device");
    assert_eq!(device.rdev(), nix::sys::stat::makedev(1, 3));
    let reported = plugin.heard_of(&id)[2].about.container.clone().expect("container");
    assert_eq!((reported.annotations["seen"].as_str(), reported.args[0].as_str()), ("yes", "sh"));
    assert_eq!(reported.linux.expect("linux").cgroups_path, cgroup);
    machine.remove_pod(&pod).await;
    plugin.leave();
}

pub(crate) async fn hooks_run_at_every_stage(machine: &mut Machine) {
    let log = machine.path("hooks.log");
    let hook = |stage: &str| {
        // The script records its stage only if the state that it reads has a status.
        let script = format!("read it; case $it in *'\"status\":'*) echo {stage} >>{};; esac", log.display());
        vec![Hook {
            path: "/bin/sh".into(),
            args: vec!["sh".into(), "-c".into(), script],
            env: vec!["PATH=/bin".into()],
            timeout: Some(OptionalInt { value: 120 }),
        }]
    };
    let hooks = Hooks {
        prestart: hook("prestart"),
        create_runtime: hook("createRuntime"),
        poststart: hook("poststart"),
        poststop: hook("poststop"),
        ..Default::default()
    };
    let adjust = ContainerAdjustment { hooks: Some(hooks), ..Default::default() };
    let plugin = Plugin::join(&machine.path("nri.sock"), "10", creation(adjust)).await;
    let pod = machine.pod("hooks").await;
    let stages = || std::fs::read_to_string(&log).unwrap_or_default().replace('\n', " ");
    let id = machine.create(&pod, "c", &["sleep", "1000"], |_| {}).await.expect("create");
    assert_eq!(stages(), "prestart createRuntime ");
    machine.start(&id).await;
    assert_eq!(stages(), "prestart createRuntime poststart ");
    plugin.leave();
    // The hooks belong to the container. They run without their plugin and after a restart of the runtime.
    machine.restart(std::time::Duration::from_millis(10)).await;
    machine.remove(&id).await;
    assert_eq!(stages(), "prestart createRuntime poststart poststop ");
    machine.remove_pod(&pod).await;
}

pub(crate) async fn conflicting_plugins_fail_the_creation(machine: &mut Machine) {
    let set = |value: &str| ContainerAdjustment { env: vec![variable("X", value)], ..Default::default() };
    let socket = machine.path("nri.sock");
    // Plugins are called in the order of their indices, not of their registration.
    let second = Plugin::join(&socket, "20", creation(set("2"))).await;
    let first = Plugin::join(&socket, "10", creation(set("1"))).await;
    let pod = machine.pod("disagree").await;
    let refused = machine.create(&pod, "c", &["true"], |_| {}).await.expect_err("a conflict");
    let words = ["20-test", "10-test", "Env X"];
    assert!(words.iter().all(|word| refused.message().contains(word)), "{refused}");
    let reported = second.all("CreateContainer")[0].about.container.clone().expect("container");
    assert!(reported.env.contains(&"X=1".to_owned()), "{:?}", reported.env);
    second.leave();
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    assert_eq!(sh(machine, &id, "echo $X").await, "1");
    machine.remove_pod(&pod).await;
    first.leave();
}

pub(crate) async fn a_cdi_device_is_injected(machine: &mut Machine) {
    let dir = machine.path("cdi");
    std::fs::create_dir_all(&dir).expect("directory");
    let spec = serde_json::json!({
        "cdiVersion": "0.6.0", "kind": "vendor.com/thing",
        "devices": [{"name": "full", "containerEdits": {
            "env": ["THING=full"], "deviceNodes": [{"path": "/dev/thing", "hostPath": "/dev/full"}]}}],
    });
    std::fs::write(dir.join("vendor.json"), spec.to_string()).expect("file");
    let device = |name: &str| ContainerAdjustment {
        cdi_devices: vec![CdiDevice { name: format!("vendor.com/thing={name}") }],
        ..Default::default()
    };
    let pod = machine.pod("cdi").await;
    let plugin = Plugin::join(&machine.path("nri.sock"), "10", creation(device("full"))).await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    assert_eq!(sh(machine, &id, "! echo x 2>/dev/null >/dev/thing && echo $THING").await, "full");
    plugin.leave();
    let plugin = Plugin::join(&machine.path("nri.sock"), "10", creation(device("other"))).await;
    let refused = machine.create(&pod, "d", &["true"], |_| {}).await.expect_err("no such device");
    assert!(refused.message().contains("vendor.com/thing=other"), "{refused}");
    plugin.leave();
    machine.remove_pod(&pod).await;
    std::fs::remove_dir_all(dir).expect("remove");
}

pub(crate) async fn unsupported_adjustments_are_refused_by_name(machine: &mut Machine) {
    let class = OptionalString { value: "gold".into() };
    let resources = LinuxResources { rdt_class: Some(class), ..Default::default() };
    let linux = LinuxContainerAdjustment { resources: Some(resources), ..Default::default() };
    let adjust = ContainerAdjustment { linux: Some(linux), ..Default::default() };
    let plugin = Plugin::join(&machine.path("nri.sock"), "10", creation(adjust)).await;
    let pod = machine.pod("unsupported").await;
    let refused = machine.create(&pod, "c", &["true"], |_| {}).await.expect_err("no classes");
    assert!(refused.message().contains("rdt_class"), "{refused}");
    machine.remove_pod(&pod).await;
    plugin.leave();
}

pub(crate) async fn a_validating_plugin_can_refuse_the_adjustments(machine: &mut Machine) {
    let socket = machine.path("nri.sock");
    let set = ContainerAdjustment { env: vec![variable("FORBIDDEN", "1")], ..Default::default() };
    let plugin = Plugin::join(&socket, "10", creation(set)).await;
    let validate = 1 << (Event::ValidateContainerAdjustment as i32 - 1);
    let validator = Plugin::join_for(&socket, "90", validate, |_| {
        let answer = ValidateContainerAdjustmentResponse { reject: true, reason: "against the rules".into() };
        PluginReply::Answer(answer.encode_to_vec())
    })
    .await;
    let pod = machine.pod("validated").await;
    let refused = machine.create(&pod, "c", &["true"], |_| {}).await.expect_err("rejected");
    assert!(refused.message().contains("90-test rejects"), "{refused}");
    assert!(refused.message().contains("against the rules"), "{refused}");
    let pristine =
        validator.all("ValidateContainerAdjustment")[0].about.container.clone().expect("container");
    assert!(!pristine.env.iter().any(|entry| entry.starts_with("FORBIDDEN")));
    machine.remove_pod(&pod).await;
    validator.leave();
    plugin.leave();
}

pub(crate) async fn a_container_can_be_evicted(machine: &mut Machine) {
    let pod = machine.pod("evicting").await;
    let (first, second) = (
        machine.run(&pod, "first", &["sleep", "1000"]).await,
        machine.run(&pod, "second", &["sleep", "1000"]).await,
    );
    let evict =
        ContainerEviction { container_id: first.clone(), reason: "the pod needs the resources".into() };
    let answer = CreateContainerResponse { evict: vec![evict], ..Default::default() }.encode_to_vec();
    let plugin = Plugin::join(&machine.path("nri.sock"), "10", move |heard| match heard.method.as_str() {
        "CreateContainer" => PluginReply::Answer(answer.clone()),
        _ => PluginReply::Yes,
    })
    .await;
    machine.create(&pod, "third", &["true"], |_| {}).await.expect("create");
    assert_eq!(machine.wait_exited(&first).await.exit_code, 137);
    plugin.hears(&first, "StopContainer").await;
    let evict = ContainerEviction { container_id: second.clone(), reason: String::new() };
    let absent = ContainerEviction { container_id: "absent".into(), reason: String::new() };
    plugin.update(&UpdateContainersRequest { evict: vec![absent, evict], ..Default::default() }).await;
    assert_eq!(machine.wait_exited(&second).await.exit_code, 137);
    machine.remove_pod(&pod).await;
    plugin.leave();
}

/// The memory limit of a container in the kernel.
async fn memory_limit(machine: &Machine, id: &str) -> String {
    limit(machine.pid(id).await, "memory", ["memory.limit_in_bytes", "memory.max"])
}

/// The content of the file of a limit, in the cgroup of a process. Its name differs between v1 and v2.
fn limit(pid: i32, controller: &str, [v1, v2]: [&str; 2]) -> String {
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("proc");
    let of = |controller: &str| {
        let line = groups.lines().find(|line| line.split(':').nth(1) == Some(controller))?;
        line.rsplit(':').next().map(str::to_owned)
    };
    let file = match of(controller) {
        Some(group) => format!("/sys/fs/cgroup/{controller}{group}/{v1}"),
        None => format!("/sys/fs/cgroup{}/{v2}", of("").expect("a cgroup")),
    };
    std::fs::read_to_string(file).expect("limit").trim().to_owned()
}

fn update(id: &str, bytes: i64) -> ContainerUpdate {
    let memory = LinuxMemory { limit: Some(OptionalInt64 { value: bytes }), ..Default::default() };
    let resources = LinuxResources { memory: Some(memory), ..Default::default() };
    ContainerUpdate {
        container_id: id.into(),
        linux: Some(LinuxContainerUpdate { resources: Some(resources) }),
        ignore_failure: false,
    }
}

pub(crate) async fn limits_of_existing_containers_change(machine: &mut Machine) {
    let pod = machine.pod("limits").await;
    let first = machine.run(&pod, "first", &["sleep", "1000"]).await;
    let second = machine.run(&pod, "second", &["sleep", "1000"]).await;
    let (of_first, of_second) = (first.clone(), second.clone());
    let plugin = Plugin::join(&machine.path("nri.sock"), "10", move |heard| match heard.method.as_str() {
        "CreateContainer" => {
            let update = vec![update(&of_first, 32 << 20)];
            PluginReply::Answer(CreateContainerResponse { update, ..Default::default() }.encode_to_vec())
        }
        // The plugin changes the updated container and another container.
        "UpdateContainer" => {
            let update = vec![update(&of_first, 48 << 20), update(&of_second, 24 << 20)];
            PluginReply::Answer(UpdateContainerResponse { update, evict: Vec::new() }.encode_to_vec())
        }
        _ => PluginReply::Yes,
    })
    .await;
    machine.create(&pod, "third", &["true"], |_| {}).await.expect("create");
    assert_eq!(memory_limit(machine, &first).await, (32 << 20).to_string());
    let linux =
        coracle_proto::cri::LinuxContainerResources { memory_limit_in_bytes: 40 << 20, ..Default::default() };
    let request = coracle_proto::cri::UpdateContainerResourcesRequest {
        container_id: first.clone(),
        linux: Some(linux),
        ..Default::default()
    };
    machine.runtime.update_container_resources(tonic::Request::new(request)).await.expect("update");
    assert_eq!(memory_limit(machine, &first).await, (48 << 20).to_string());
    assert_eq!(memory_limit(machine, &second).await, (24 << 20).to_string());
    assert!(plugin.methods_of(&first).ends_with(&["UpdateContainer".into(), "PostUpdateContainer".into()]));
    let mut pids = update(&second, 28 << 20);
    pids.linux.as_mut().and_then(|linux| linux.resources.as_mut()).expect("limits").pids =
        Some(LinuxPids { limit: 5 });
    let both = vec![update(&first, 36 << 20), pids.clone(), update("absent", 1)];
    let answer = plugin.update(&UpdateContainersRequest { update: both, ..Default::default() }).await;
    assert_eq!(answer.failed, [pids]);
    assert_eq!(memory_limit(machine, &first).await, (36 << 20).to_string());
    machine.remove_pod(&pod).await;
    plugin.leave();
}
