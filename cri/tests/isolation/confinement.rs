//! Devices, groups, and confinement features of the kernel.

use coracle_proto::cri;
use coracle_proto::cri::security_profile::ProfileType;

use super::sh;
use super::user_namespace::{container, options, pod, range};
use crate::fixture::{Machine, security};

pub(super) async fn a_cdi_device_has_its_mounts_hooks_and_environment(machine: &mut Machine) {
    let dir = machine.cdi_dir();
    std::fs::create_dir_all(&dir).expect("directory");
    let file = tempfile::NamedTempFile::new().expect("file");
    std::fs::write(file.path(), "of the vendor").expect("file");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o644);
    std::fs::set_permissions(file.path(), open).expect("permissions");
    let spec = serde_json::json!({
        "cdiVersion": "0.6.0", "kind": "vendor.com/thing",
        "devices": [{"name": "full", "containerEdits": {
            "env": ["THING=full"],
            "deviceNodes": [{"path": "/dev/thing", "hostPath": "/dev/full"}],
            "mounts": [{"hostPath": file.path(), "containerPath": "/opt/thing", "options": ["ro", "nosuid"]}]}}],
    });
    std::fs::write(dir.join("vendor.json"), spec.to_string()).expect("file");
    let wanted = vec![cri::CdiDevice { name: "vendor.com/thing=full".into() }];
    let plain = machine.pod("cdi").await;
    let id = machine
        .create(&plain, "c", &["sleep", "1000"], |config| config.cdi_devices = wanted.clone())
        .await
        .expect("create");
    machine.start(&id).await;
    let mapped = options(range());
    let userns = pod(machine, "cdi-userns", &mapped).await.expect("sandbox");
    let inside = container(machine, &userns, &mapped, |config| config.cdi_devices = wanted.clone()).await;
    for id in [&id, &inside] {
        // Reads of /dev/full succeed, writes fail.
        let script = "head -c1 /dev/thing | od -An -tx1 | tr -d ' '; ! echo x 2>/dev/null > /dev/thing; \
                      cat /opt/thing; ! echo > /opt/thing 2>/dev/null; stat -c ' %u' /dev/thing";
        assert_eq!(sh(machine, id, script).await, "00\nof the vendor 0");
    }
    // An exec has the environment of the container's process.
    assert_eq!(sh(machine, &id, "echo $THING").await, "full");
    let other = vec![cri::CdiDevice { name: "vendor.com/thing=other".into() }];
    let error = machine.create(&plain, "o", &["true"], |config| config.cdi_devices = other).await;
    assert!(error.expect_err("no such device").message().contains("vendor.com/thing=other"));
    machine.remove_pod(&plain).await;
    machine.remove_pod(&userns).await;
    std::fs::remove_dir_all(dir).expect("remove");
}

/// Device node and number of a block device that root of this machine can open.
fn disk() -> (String, String) {
    let disks = std::fs::read_dir("/sys/block").expect("disks").flatten();
    let mut names = disks.map(|disk| disk.file_name().to_string_lossy().into_owned());
    let name = names.find(|name| std::fs::File::open(format!("/dev/{name}")).is_ok());
    let name = name.expect("no block device can be opened");
    let number = std::fs::read_to_string(format!("/sys/block/{name}/dev")).expect("number");
    (format!("/dev/{name}"), number.trim().replace(':', " "))
}

pub(super) async fn a_container_accesses_only_its_devices(machine: &mut Machine) {
    let (node, number) = disk();
    let make = format!("rm -f /tmp/disk; mknod /tmp/disk b {number}");
    let own = "echo x >/dev/null && head -c1 /dev/zero >/dev/null && head -c1 /dev/random >/dev/null && \
               head -c1 /dev/urandom >/dev/null && ! echo x 2>/dev/null >/dev/full && : <>/dev/ptmx && \
               ! (: </dev/tty) 2>&1 | grep -q permitted";
    // A hook makes libcontainer create the container.
    let dir = machine.cdi_dir();
    std::fs::create_dir_all(&dir).expect("directory");
    let hook = serde_json::json!({ "hookName": "createRuntime", "path": "/bin/busybox", "args": ["busybox", "true"] });
    let hooked = serde_json::json!({
        "cdiVersion": "0.6.0", "kind": "vendor.com/hook",
        "devices": [{"name": "one", "containerEdits": { "hooks": [hook] }}],
    });
    std::fs::write(dir.join("hook.json"), hooked.to_string()).expect("file");

    let pod = machine.pod("devices").await;
    let plain = machine.run(&pod, "plain", &["sleep", "1000"]).await;
    let by_library = |config: &mut cri::ContainerConfig| {
        config.cdi_devices = vec![cri::CdiDevice { name: "vendor.com/hook=one".into() }];
    };
    let library = machine.create(&pod, "library", &["sleep", "1000"], by_library).await.expect("create");
    machine.start(&library).await;
    let readable = |config: &mut cri::ContainerConfig| {
        let (host_path, container_path) = (node.clone(), "/dev/disk".to_owned());
        config.devices = vec![cri::Device { host_path, container_path, permissions: "r".into() }];
    };
    let reader = machine.create(&pod, "reader", &["sleep", "1000"], readable).await.expect("create");
    machine.start(&reader).await;
    for id in [&plain, &library, &reader] {
        sh(machine, id, own).await;
        sh(machine, id, &make).await;
    }
    for id in [&plain, &library] {
        sh(machine, id, "! (: </tmp/disk) 2>/dev/null && ! (: >>/tmp/disk) 2>/dev/null").await;
    }
    sh(machine, &reader, ": </dev/disk && : </tmp/disk").await;
    sh(machine, &reader, "(: >>/dev/disk) 2>&1 | grep -q permitted && ! (: <>/tmp/disk) 2>/dev/null").await;
    machine.remove_pod(&pod).await;

    let open = |config: &mut cri::PodSandboxConfig| {
        let linux = config.linux.get_or_insert_default();
        linux.security_context.get_or_insert_default().privileged = true;
    };
    let pod = machine.try_pod("all-devices", open).await.expect("sandbox");
    let all = |config: &mut cri::ContainerConfig| security(config).privileged = true;
    let id = machine.create(&pod, "c", &["sleep", "1000"], all).await.expect("create");
    machine.start(&id).await;
    sh(machine, &id, &format!("{own} && {make} && : </tmp/disk && : <{node}")).await;
    machine.remove_pod(&pod).await;

    let mapped = options(range());
    let pod = super::user_namespace::pod(machine, "userns-devices", &mapped).await.expect("sandbox");
    let id = container(machine, &pod, &mapped, |_| {}).await;
    sh(machine, &id, own).await;
    machine.remove_pod(&pod).await;
    std::fs::remove_dir_all(dir).expect("remove");
}

pub(super) async fn supplemental_groups_follow_the_policy(machine: &mut Machine) {
    let pod = machine.pod("groups").await;
    for (policy, groups) in [
        (cri::SupplementalGroupsPolicy::Merge, vec![0, 77, 42]),
        (cri::SupplementalGroupsPolicy::Strict, vec![0, 42]),
    ] {
        let id = machine
            .create(&pod, policy.as_str_name(), &["sleep", "1000"], |config| {
                let security = security(config);
                security.run_as_user = Some(cri::Int64Value { value: 0 });
                security.supplemental_groups = vec![42];
                security.set_supplemental_groups_policy(policy);
            })
            .await
            .expect("create");
        machine.start(&id).await;
        let user = machine.status(&id).await.user.and_then(|user| user.linux).expect("user");
        assert_eq!((user.uid, user.gid, &user.supplemental_groups), (0, 0, &groups));
        let pid = machine.pid(&id).await;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("status");
        let line = status.lines().find_map(|line| line.strip_prefix("Groups:")).expect("groups");
        let mut gids: Vec<i64> = line.split_whitespace().map(|gid| gid.parse().expect("gid")).collect();
        let mut expected = groups.clone();
        gids.sort_unstable();
        expected.sort_unstable();
        assert_eq!(gids, expected);
    }
    machine.remove_pod(&pod).await;
}

/// Containers that request no profile, the default profile, and no confinement. All run as root with CAP_SYS_ADMIN.
pub(super) async fn the_default_profile_applies_if_the_kernel_has_apparmor(machine: &mut Machine) {
    let enabled = std::fs::read_to_string("/sys/module/apparmor/parameters/enabled");
    let enabled = enabled.is_ok_and(|text| text.trim() == "Y");
    if !enabled {
        coracle_testing::skip_part!("the kernel has no AppArmor");
    }
    let pod = machine.pod("profile").await;
    let mut started = Vec::new();
    for kind in [None, Some(ProfileType::RuntimeDefault), Some(ProfileType::Unconfined)] {
        let name = kind.map_or("silent", |kind| kind.as_str_name());
        let id = machine.create(&pod, name, &["sleep", "1000"], |config| {
            let security = security(config);
            security.apparmor =
                kind.map(|kind| cri::SecurityProfile { profile_type: kind.into(), ..Default::default() });
            let right = vec!["SYS_ADMIN".to_owned()];
            security.capabilities = Some(cri::Capability { add_capabilities: right, ..Default::default() });
        });
        let id = id.await.expect("create");
        machine.start(&id).await;
        started.push(id);
    }
    let [silent, default, free] = started.as_slice() else { unreachable!("three were started") };
    // Writes the current value, so that a success changes nothing.
    let limit = "/proc/sys/kernel/randomize_va_space";
    let attempts = format!(
        "mount -t tmpfs x /tmp 2>/dev/null && umount /tmp && echo mounts; \
         was=$(cat {limit}) && echo $was 2>/dev/null > {limit} && echo writes; \
         sleep 100 & kill $! && echo signals"
    );
    for id in [silent, default] {
        let expected = if enabled { "signals" } else { "mounts\nwrites\nsignals" };
        assert_eq!(sh(machine, id, &attempts).await, expected);
        // The labels of the exec and of the container's first process.
        let label = std::fs::read_to_string(format!("/proc/{}/attr/current", machine.pid(id).await));
        if enabled {
            assert_eq!(label.expect("label").trim(), "coracle-default (enforce)");
            assert_eq!(sh(machine, id, "cat /proc/self/attr/current").await, "coracle-default (enforce)");
        }
        // The process ignores the first signal.
        machine.stop(id, 1).await;
    }
    assert_eq!(sh(machine, free, &attempts).await, "mounts\nwrites\nsignals");
    machine.remove_pod(&pod).await;
}

pub(super) async fn an_absent_profile_a_global_sysctl_and_a_slice_are_refused(machine: &mut Machine) {
    let pod = machine.pod("confined").await;
    let profile = cri::SecurityProfile {
        profile_type: cri::security_profile::ProfileType::Localhost.into(),
        localhost_ref: "no-such-profile".into(),
    };
    let error = machine
        .create(&pod, "named", &["true"], |config| security(config).apparmor = Some(profile))
        .await
        .expect_err("no such profile here");
    assert!(error.message().contains("no-such-profile"), "{error}");
    machine.remove_pod(&pod).await;
    let global = machine.try_pod("sysctl", |config| {
        let linux = config.linux.get_or_insert_default();
        linux.sysctls.insert("kernel.core_pattern".into(), "x".into());
    });
    assert!(global.await.expect_err("the node's own").message().contains("kernel.core_pattern"));
    let slice = machine.try_pod("slice", |config| {
        config.linux.get_or_insert_default().cgroup_parent = "/kubepods.slice/kubepods-pod1.slice".into();
    });
    assert!(slice.await.expect_err("systemd's").message().contains("is a slice"));
}
