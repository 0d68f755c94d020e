//! Pods with a user namespace.

use std::os::unix::fs::{FileTypeExt, MetadataExt};

use coracle_proto::cri;
use cri::NamespaceMode;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::sh;
use crate::fixture::{Machine, security};

const FIRST: u32 = 70_000;

pub(super) fn options(mapping: cri::IdMapping) -> cri::NamespaceOption {
    let userns =
        cri::UserNamespace { mode: NamespaceMode::Pod.into(), uids: vec![mapping], gids: vec![mapping] };
    cri::NamespaceOption {
        pid: NamespaceMode::Container.into(),
        userns_options: Some(userns),
        ..Default::default()
    }
}

pub(super) fn range() -> cri::IdMapping {
    cri::IdMapping { container_id: 0, host_id: FIRST, length: 65536 }
}

pub(super) async fn pod(
    machine: &Machine,
    name: &str,
    options: &cri::NamespaceOption,
) -> Result<String, tonic::Status> {
    let options = options.clone();
    machine
        .try_pod(name, |config| {
            let linux = config.linux.get_or_insert_default();
            linux.security_context.get_or_insert_default().namespace_options = Some(options);
        })
        .await
}

pub(super) async fn container(
    machine: &Machine,
    pod: &str,
    options: &cri::NamespaceOption,
    change: impl FnOnce(&mut cri::ContainerConfig),
) -> String {
    let id = machine
        .create(pod, "c", &["sh", "-c", "id -u; sleep 1000"], |config| {
            security(config).namespace_options = Some(options.clone());
            change(config);
        })
        .await
        .expect("create");
    machine.start(&id).await;
    id
}

/// The uids of a process, seen from the node.
fn host_uid(pid: i32) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
    let line = status.lines().find(|line| line.starts_with("Uid:")).expect("ids");
    line.split_whitespace().nth(1).expect("an id").to_owned()
}

pub(super) async fn root_of_a_user_namespace_has_no_rights_outside(machine: &mut Machine) {
    let options = options(range());
    let pod = pod(machine, "userns", &options).await.expect("sandbox");
    let id = container(machine, &pod, &options, |config| {
        security(config).capabilities = Some(cri::Capability {
            add_capabilities: vec!["NET_ADMIN".into(), "SYS_ADMIN".into()],
            ..Default::default()
        });
    })
    .await;
    let pid = machine.pid(&id).await;
    let map = std::fs::read_to_string(format!("/proc/{pid}/uid_map")).expect("map");
    assert_eq!(map.split_whitespace().collect::<Vec<_>>(), ["0", "70000", "65536"]);
    assert_eq!(host_uid(pid), "70000");
    assert_eq!(sh(machine, &id, "id -u; cat /proc/self/uid_map | tr -s ' '").await, "0\n 0 70000 65536");
    assert_eq!(
        sh(machine, &id, "stat -c %u:%g / /bin/busybox /etc/passwd /etc/hosts | sort -u").await,
        "0:0"
    );
    // Root of the container may change what its namespaces own.
    sh(machine, &id, "ip link set lo down && hostname changed && test $(hostname) = changed").await;
    // Root of the container is refused operations that require root of the node.
    for forbidden in ["mknod /tmp/x c 1 3", "echo 1 > /proc/sys/kernel/sysrq"] {
        let answer = machine.exec(&id, &["sh", "-c", forbidden], 0).await.expect("exec");
        assert_ne!(answer.exit_code, 0, "{forbidden}");
    }
    let reported = machine.sandbox(&pod).await.linux.and_then(|linux| linux.namespaces);
    assert_eq!(reported.and_then(|namespaces| namespaces.options).as_ref(), Some(&options));
    machine.restart(std::time::Duration::from_millis(100)).await;
    assert_eq!(sh(machine, &id, "id -u").await, "0");
    machine.remove_pod(&pod).await;
}

pub(super) async fn volumes_show_their_ids_as_the_mapping_says(machine: &mut Machine) {
    let options = options(range());
    let pod = pod(machine, "userns-volumes", &options).await.expect("sandbox");
    let dir = tempfile::tempdir().expect("directory");
    let (mapped, plain) = (dir.path().join("mapped"), dir.path().join("plain"));
    for volume in [&mapped, &plain] {
        std::fs::create_dir(volume).expect("directory");
        std::fs::write(volume.join("root"), "").expect("file");
        std::fs::write(volume.join("user"), "").expect("file");
        std::os::unix::fs::chown(volume.join("user"), Some(1000), Some(1000)).expect("chown");
    }
    let mount = |path: &std::path::Path, inside: &str| cri::Mount {
        container_path: inside.into(),
        host_path: path.to_string_lossy().into_owned(),
        ..Default::default()
    };
    let id = container(machine, &pod, &options, |config| {
        let mut with = mount(&mapped, "/mapped");
        with.uid_mappings = vec![range()];
        with.gid_mappings = vec![range()];
        let read_only = cri::Mount { readonly: true, container_path: "/ro".into(), ..with.clone() };
        config.mounts = vec![with, read_only, mount(&plain, "/plain")];
        config.working_dir = "/mapped/made/for/it".into();
    })
    .await;
    assert_eq!(sh(machine, &id, "stat -c %u /mapped/root /mapped/user /plain/root").await, "0\n1000\n65534");
    sh(machine, &id, "touch /mapped/new && ! touch /plain/new 2>/dev/null && ! touch /ro/new 2>/dev/null")
        .await;
    assert_eq!(
        std::fs::metadata(mapped.join("new")).expect("made").uid(),
        0,
        "the file has the owner of the volume"
    );
    assert_eq!(std::fs::metadata(mapped.join("made/for/it")).expect("made").uid(), 0);
    machine.remove_pod(&pod).await;
}

pub(super) async fn a_container_with_a_user_namespace_has_all_features(machine: &mut Machine) {
    let options = options(range());
    let pod = pod(machine, "userns-all", &options).await.expect("sandbox");
    let id = container(machine, &pod, &options, |config| {
        config.devices = vec![cri::Device {
            host_path: "/dev/null".into(),
            container_path: "/dev/nix".into(),
            permissions: "rw".into(),
        }];
        config.working_dir = "/made".into();
        let security = security(config);
        security.masked_paths = vec!["/proc/kcore".into(), "/sys/firmware".into()];
        security.readonly_paths = vec!["/proc/sys".into()];
        security.run_as_user = Some(cri::Int64Value { value: 1000 });
    })
    .await;
    assert_eq!(host_uid(machine.pid(&id).await), "71000");
    sh(machine, &id, "echo x > /dev/nix && echo x > /dev/null && head -c1 /dev/urandom >/dev/null").await;
    sh(
        machine,
        &id,
        "echo x > /dev/shm/x && test -d /sys/fs/cgroup && test -e /proc/1/stat && test $(pwd) = /made",
    )
    .await;
    sh(machine, &id, "echo again > /dev/stdout && ls /sys/class/net | grep -q eth0").await;
    let status = machine.status(&id).await;
    let log = std::fs::read_to_string(&status.log_path).expect("log");
    assert!(log.contains("stdout F 1000"), "{log}");
    let error = machine
        .create(&pod, "outside", &["true"], |config| {
            security(config).namespace_options = Some(options.clone());
            security(config).run_as_user = Some(cri::Int64Value { value: 100_000 });
        })
        .await
        .expect_err("no such user in there");
    assert!(error.message().contains("100000"), "{error}");
    machine.remove_pod(&pod).await;
}

/// Names of the nodes in the machine's /dev that only their owner and their group may open.
fn private_nodes() -> Vec<String> {
    let is_private = |entry: &std::fs::DirEntry| {
        entry.metadata().is_ok_and(|found| {
            let kind = found.file_type();
            (kind.is_char_device() || kind.is_block_device()) && found.mode() & 0o6 == 0
        })
    };
    let entries = std::fs::read_dir("/dev").expect("list").flatten().filter(is_private);
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

pub(super) async fn a_privileged_container_in_a_user_namespace_opens_no_disks(machine: &mut Machine) {
    let options = options(range());
    let of_pod = options.clone();
    let pod = machine
        .try_pod("userns-privileged", |config| {
            let security = config.linux.get_or_insert_default().security_context.get_or_insert_default();
            (security.namespace_options, security.privileged) = (Some(of_pod), true);
        })
        .await
        .expect("sandbox");
    let dir = tempfile::tempdir().expect("directory");
    // An image can have such a node, too. No driver has this number.
    let (mode, number) = (Mode::from_bits_truncate(0o666), makedev(120, 77));
    mknod(&dir.path().join("node"), SFlag::S_IFCHR, mode, number).expect("mknod");
    let id = container(machine, &pod, &options, |config| {
        config.mounts = vec![cri::Mount {
            container_path: "/volume".into(),
            host_path: dir.path().to_string_lossy().into_owned(),
            uid_mappings: vec![range()],
            gid_mappings: vec![range()],
            ..Default::default()
        }];
        security(config).privileged = true;
    })
    .await;
    sh(machine, &id, "echo x > /dev/null && head -c1 /dev/urandom > /dev/null && test -c /dev/ptmx").await;
    let names = private_nodes().join(" ");
    sh(machine, &id, &format!("for name in {names}; do test ! -e /dev/$name || exit 1; done")).await;
    let answer = machine.exec(&id, &["cat", "/volume/node"], 0).await.expect("exec");
    let error = String::from_utf8_lossy(&answer.stderr).into_owned();
    // If the cgroup allowed the device, the kernel would search for its driver and return ENXIO.
    assert!(answer.exit_code != 0 && !error.contains("No such device"), "{error}");
    machine.remove_pod(&pod).await;
}

pub(super) async fn a_user_namespace_works_with_a_shared_pid_namespace_and_the_host_network(
    machine: &mut Machine,
) {
    let mut shared = options(range());
    shared.pid = NamespaceMode::Pod.into();
    let first = pod(machine, "userns-pid", &shared).await.expect("sandbox");
    let id = container(machine, &first, &shared, |_| {}).await;
    assert_eq!(sh(machine, &id, "cat /proc/1/comm").await, "coracle-init");
    machine.remove_pod(&first).await;
    let mut network = options(range());
    network.network = NamespaceMode::Node.into();
    let second = pod(machine, "userns-net", &network).await.expect("sandbox");
    let id = container(machine, &second, &network, |_| {}).await;
    sh(machine, &id, "test -d /sys/class/net && ip link show corcri0 >/dev/null").await;
    let answer = machine.exec(&id, &["ip", "link", "set", "corcri0", "down"], 0).await.expect("exec");
    assert_ne!(answer.exit_code, 0, "the node's network is not its own");
    machine.remove_pod(&second).await;
}

pub(super) async fn a_wrong_mapping_is_refused(machine: &mut Machine) {
    let before = machine.traces().await;
    let mut two = options(range());
    if let Some(userns) = two.userns_options.as_mut() {
        userns.uids.push(range());
    }
    let error = pod(machine, "two", &two).await.expect_err("two mappings");
    assert!(error.message().contains("exactly one mapping"), "{error}");
    let error = pod(machine, "one", &options(cri::IdMapping { container_id: 1, ..range() })).await;
    assert!(error.expect_err("no root").message().contains("id 0"));
    let options = options(range());
    let pod = pod(machine, "userns-other", &options).await.expect("sandbox");
    let error = machine.create(&pod, "c", &["true"], |_| {}).await.expect_err("another");
    assert!(error.message().contains("differs from its pod's"), "{error}");
    machine.remove_pod(&pod).await;
    assert_eq!(machine.traces().await, before);
}
