//! Vulnerabilities that an image triggers: its configuration, or links where the runtime mounts something.

use std::fs;
use std::os::unix::fs::symlink;

use coracle_integration::{eventually, on_a_cluster};
use serde_json::{Value, json};

use super::{refused, run_pod, sh, sleeper};

/// CVE-2019-11245: the user of an image was only used at a container's first start.
#[test]
fn cve_2019_11245_the_user_of_an_image_applies_at_every_start() {
    on_a_cluster(|machine, cluster| {
        let root = machine.path("root");
        fs::create_dir(&root).unwrap();
        machine.push_root("user", &root, &["--user", "1234"]);
        let command = json!({"image": "user", "command": ["sh", "-c", "id -u; exit 1"]});
        cluster.apply(&sleeper("p", &json!({}), &command));
        eventually("a second start", 60, || {
            cluster.get(&["pod", "p"])["status"]["containerStatuses"][0]["restartCount"].as_u64() > Some(0)
        });
        for which in ["--previous=true", "--previous=false"] {
            // Between two starts there is no log for a moment.
            let log = eventually("a log", 60, || {
                let output = cluster.try_kubectl(&["logs", "p", which]);
                output.status.success().then_some(output.stdout)
            });
            assert_eq!(String::from_utf8_lossy(&log).trim(), "1234");
        }
    });
}

/// CVE-2024-40635: a user id above 32 bits ran as root.
#[test]
fn cve_2024_40635_a_user_id_that_overflows_is_refused() {
    on_a_cluster(|machine, cluster| {
        for (name, user) in [("wide", "4294967296"), ("minus", "-1")] {
            let root = machine.path(&format!("root-{name}"));
            fs::create_dir(&root).unwrap();
            machine.push_root(name, &root, &["--user", user]);
            let why = refused(cluster, name, &sleeper(name, &json!({}), &json!({"image": name})));
            assert!(why.contains("user") || why.contains("User"), "{user}: {why}");
        }
        let strict = json!({"image": "wide", "securityContext": {"runAsNonRoot": true}});
        refused(cluster, "strict", &sleeper("strict", &json!({}), &strict));
    });
}

/// CVE-2019-16884, CVE-2019-19921, CVE-2023-27561, CVE-2023-28642, CVE-2025-54867: with an image's link at /proc or
/// /sys, the runtime mounted and masked files at another path.
#[test]
fn cve_2023_27561_a_link_at_proc_or_sys_is_refused() {
    on_a_cluster(|machine, cluster| {
        for name in ["proc", "sys"] {
            let root = machine.path(&format!("root-{name}"));
            fs::create_dir_all(root.join("evil")).unwrap();
            symlink("/evil", root.join(name)).unwrap();
            machine.push_root(name, &root, &[]);
            let why = refused(cluster, name, &sleeper(name, &json!({}), &json!({"image": name})));
            assert!(why.contains(&format!("/{name}")), "{why}");
        }
    });
}

/// CVE-2026-41579, CVE-2026-88264: if /dev of an image was a link, the runtime created device nodes and links at its
/// target, also in a volume.
#[test]
fn cve_2026_41579_a_link_at_dev_is_refused() {
    on_a_cluster(|machine, cluster| {
        let root = machine.path("root");
        fs::create_dir_all(root.join("volume")).unwrap();
        symlink("/volume", root.join("dev")).unwrap();
        machine.push_root("dev", &root, &[]);
        let volume = machine.path("volume");
        fs::create_dir(&volume).unwrap();
        let pod = json!({"volumes": [{"name": "v", "hostPath": {"path": volume}}]});
        let container = json!({"image": "dev", "volumeMounts": [{"name": "v", "mountPath": "/volume"}]});
        let why = refused(cluster, "p", &sleeper("p", &pod, &container));
        assert!(why.contains("/dev"), "{why}");
        assert_eq!(fs::read_dir(&volume).unwrap().count(), 0, "the runtime created a file in the volume");
    });
}

/// CVE-2021-30465, CVE-2024-45310, CVE-2024-5154: links of an image at mount points led to the host.
#[test]
fn cve_2024_45310_links_at_mount_points_stay_inside() {
    on_a_cluster(|machine, cluster| {
        let host = machine.path("host");
        fs::create_dir(&host).unwrap();
        let root = machine.path("root");
        fs::create_dir_all(root.join("etc")).unwrap();
        let outside = host.to_str().unwrap();
        let climb = format!("../../../../../../../../..{outside}");
        for (place, target) in [
            ("etc/hosts", format!("{climb}/hosts")),
            ("etc/resolv.conf", format!("{outside}/resolv.conf")),
            ("etc/mtab", format!("{climb}/mtab")),
            ("data", climb.clone()),
            ("message", format!("{outside}/message")),
        ] {
            symlink(target, root.join(place)).unwrap();
        }
        machine.push_root("links", &root, &[]);
        let container = json!({"image": "links", "terminationMessagePath": "/message",
            "volumeMounts": [{"name": "v", "mountPath": "/data/deeper"}]});
        run_pod(
            cluster,
            "p",
            &sleeper("p", &json!({"volumes": [{"name": "v", "emptyDir": {}}]}), &container),
        );
        assert_eq!(sh(cluster, "p", "touch /data/deeper/file && ls /data/deeper").trim(), "file");
        assert_eq!(fs::read_dir(&host).unwrap().count(), 0, "the runtime created a file on the host");
    });
}

/// CVE-2025-24965: for a container in a virtual machine, which an annotation selects, crun wrote a configuration file
/// through a link of the image.
#[test]
fn cve_2025_24965_no_annotation_selects_a_virtual_machine() {
    on_a_cluster(|machine, cluster| {
        let (root, target) = (machine.path("root"), machine.path("target"));
        fs::create_dir(&root).unwrap();
        symlink(&target, root.join(".krun_config.json")).unwrap();
        machine.push_root("krun", &root, &[]);
        let pod = sleeper("p", &json!({}), &json!({"image": "krun"}));
        let mut pod: Value = serde_json::from_str(&pod).unwrap();
        pod["metadata"]["annotations"] = json!({"run.oci.handler": "krun"});
        run_pod(cluster, "p", &pod.to_string());
        let link = sh(cluster, "p", "readlink /.krun_config.json");
        assert_eq!(link.trim(), target.to_str().unwrap());
        assert!(!target.exists());
    });
}
