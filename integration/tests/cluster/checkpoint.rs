//! Checkpoints of containers through the kubelet API, as `kubectl` and tools for forensics request them.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use coracle_integration::{Cluster, Machine, on_a_machine, skip};
use coracle_testing::CRIU_STAND_IN;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use serde_json::{Value, json};

/// Puts the replacement over the CRIU of the machine, in a mount namespace of this thread and its children.
fn replace_criu(machine: &Machine, criu: &Path) {
    let stand_in = machine.path("criu");
    fs::write(&stand_in, CRIU_STAND_IN).unwrap();
    fs::set_permissions(&stand_in, Permissions::from_mode(0o755)).unwrap();
    unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_FS).unwrap();
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
    mount(Some(&stand_in), criu, none, MsFlags::MS_BIND, none).unwrap();
}

fn criu() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).map(|dir| dir.join("criu")).find(|file| file.is_file())
}

/// Requests a checkpoint of `NAMESPACE/POD/CONTAINER[?QUERY]`. Standard error has the body of the response.
fn request(cluster: &Cluster, target: &str, more: &[&str]) -> Output {
    let path = format!("/api/v1/nodes/node-1/proxy/checkpoint/{target}");
    cluster.kubectl_of("1.37", &[&["create", "--raw", &path, "-f", "-", "-v=8"][..], more].concat(), "")
}

fn assert_refused(output: &Output, expected: &str) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains(expected), "{expected:?} is not in: {errors}");
}

#[test]
fn a_checkpoint_is_written_for_root_and_the_container_continues() {
    let Some(criu) = criu() else { skip!("CRIU is not installed") };
    on_a_machine(move |machine| {
        replace_criu(machine, &criu);
        let mirrors = machine.start_registry();
        let cluster = Cluster::up(machine, &mirrors);
        cluster.kubectl(&["run", "p", "--image=busybox", "--command", "--", "sleep", "100000"]);
        cluster.kubectl(&["wait", "pod/p", "--for=condition=Ready", "--timeout=120s"]);
        assert_refused(&request(&cluster, "default/absent/p", &[]), "pod does not exist");
        assert_refused(&request(&cluster, "default/p/absent", &[]), "container absent does not exist");
        assert_refused(&request(&cluster, "default/p/p?timeout=soon", &[]), "cannot parse value of timeout");
        let tenant = "--as=system:serviceaccount:default:default";
        assert_refused(&request(&cluster, "default/p/p", &[tenant]), "forbidden");
        let checkpoints = machine.path("state/checkpoints");
        assert!(!checkpoints.exists() || fs::read_dir(&checkpoints).unwrap().next().is_none());

        let output = request(&cluster, "default/p/p?timeout=60", &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        let archive = Path::new(answer["items"][0].as_str().unwrap());
        assert_eq!(archive.parent(), Some(checkpoints.as_path()), "{answer}");
        let name = archive.file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with("checkpoint-p_default-p-") && name.ends_with(".tar"), "{name}");
        // A checkpoint contains the memory of the container, and so its secrets.
        assert_eq!(fs::metadata(archive).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(fs::metadata(&checkpoints).unwrap().permissions().mode() & 0o7777, 0o700);
        let listed = Command::new("tar").arg("-tf").arg(archive).output().unwrap();
        let files = String::from_utf8_lossy(&listed.stdout).into_owned();
        for file in ["spec.dump", "config.dump", "checkpoint/inventory.img"] {
            assert!(files.lines().any(|line| line == file), "{file} is not in\n{files}");
        }
        let status = cluster.get(&["pod", "p"])["status"]["containerStatuses"][0].clone();
        assert!(status["state"]["running"].is_object() && status["restartCount"] == 0, "{status}");
        assert_eq!(
            cluster.kubectl(&["exec", "p", "--", "echo", "alive"]),
            "alive\n",
            "the container is still frozen"
        );
    });
}

/// CVE-2026-119101: a link of an image gave a mount point a name that CRIU reads as two names.
#[test]
fn a_mount_point_that_criu_misreads_is_in_no_checkpoint() {
    let Some(criu) = criu() else { skip!("CRIU is not installed") };
    on_a_machine(move |machine| {
        replace_criu(machine, &criu);
        let mirrors = machine.start_registry();
        let root = machine.path("root");
        fs::create_dir_all(root.join("x]:/etc")).unwrap();
        symlink("/x]:/etc", root.join("data")).unwrap();
        machine.push_root("links", &root, &[]);
        let cluster = Cluster::up(machine, &mirrors);
        let container = json!({"name": "c", "image": "links", "command": ["sleep", "100000"],
            "volumeMounts": [{"name": "v", "mountPath": "/data"}]});
        let spec = json!({"containers": [container], "volumes": [{"name": "v", "emptyDir": {}}]});
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec});
        cluster.apply(&pod.to_string());
        cluster.kubectl(&["wait", "pod/p", "--for=condition=Ready", "--timeout=120s"]);
        assert_refused(&request(&cluster, "default/p/c", &[]), "cannot parse the mount point");
        assert_eq!(
            cluster.kubectl(&["exec", "p", "--", "echo", "alive"]),
            "alive\n",
            "the container is still frozen"
        );
    });
}
