//! Image garbage collection on a small disk: it removes unused images, least recently used first. Images in use and
//! pinned images remain. A pull that failed for lack of space succeeds when it is retried.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use coracle_integration::{Cluster, Machine, eventually, on_a_machine};
use coracle_proto::cri;
use coracle_proto::cri::image_service_client::ImageServiceClient;
use coracle_proto::cri::runtime_service_client::RuntimeServiceClient;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use tonic::transport::{Channel, Endpoint};

/// A tmpfs on a directory, in a mount namespace of this thread and its children.
struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts the tmpfs with a size in MiB.
    fn on(path: PathBuf, megabytes: u32) -> Self {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let none: Option<&str> = None;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        std::fs::create_dir_all(&path).unwrap();
        let size = format!("size={megabytes}m");
        mount(Some("tmpfs"), &path, Some("tmpfs"), MsFlags::empty(), Some(size.as_str())).unwrap();
        Self(path)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        umount2(&self.0, MntFlags::MNT_DETACH).ok();
    }
}

/// Calls the runtime.
fn call<T, F: Future<Output = T>>(machine: &Machine, what: impl FnOnce(Channel) -> F) -> T {
    let socket = format!("unix://{}", machine.path("run/cri.sock").display());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { what(Endpoint::try_from(socket).unwrap().connect().await.unwrap()).await })
}

/// Number of containers in all states.
fn containers(machine: &Machine) -> usize {
    let request = cri::ListContainersRequest::default();
    let listed = call(machine, |channel| async {
        RuntimeServiceClient::new(channel).list_containers(request).await.unwrap()
    });
    listed.into_inner().containers.len()
}

/// Images that the runtime lists: short name, and whether the image is pinned.
fn images(machine: &Machine) -> Vec<(String, bool)> {
    let request = cri::ListImagesRequest::default();
    let listed = call(machine, |channel| async {
        ImageServiceClient::new(channel).list_images(request).await.unwrap()
    });
    let short = |tag: &String| tag.rsplit('/').next().unwrap().split(':').next().unwrap().to_owned();
    let images = listed.into_inner().images.into_iter();
    let mut images: Vec<_> =
        images.map(|image| (image.repo_tags.first().map(short).unwrap_or_default(), image.pinned)).collect();
    images.sort();
    images
}

fn names(machine: &Machine) -> Vec<String> {
    images(machine).into_iter().map(|(name, _)| name).collect()
}

/// Runs `coracle image`, which must succeed.
fn image(machine: &Machine, arguments: &[&str]) {
    let mut command = Command::new(Machine::coracle());
    command
        .args(["image", "--state-dir"])
        .arg(machine.path("state"))
        .arg("--run-dir")
        .arg(machine.path("run"));
    let output = command.args(arguments).output().unwrap();
    assert!(output.status.success(), "image {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn start(cluster: &Cluster, pod: &str) {
    cluster.apply(&format!(
        r#"{{"apiVersion":"v1","kind":"Pod","metadata":{{"name":"{pod}"}},"spec":{{"terminationGracePeriodSeconds":0,
        "containers":[{{"name":"c","image":"{pod}","imagePullPolicy":"IfNotPresent","command":["sleep","100000"]}}]}}}}"#
    ));
    cluster.kubectl(&["wait", &format!("pod/{pod}"), "--for=condition=Ready", "--timeout=300s"]);
}

/// The current second of the clock.
fn second() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs()
}

fn test(machine: &mut Machine, mirrors: &Path) {
    let disk = SmallDisk::on(machine.path("state/images"), 120);
    let mut flags = vec!["--image-gc-high-threshold", "75", "--image-gc-low-threshold", "70"];
    flags.extend(["--image-minimum-gc-age", "1s", "--pinned-image", "*PINNED*"]);
    let mut cluster = Cluster::up_with(machine, mirrors, &flags);

    // 80 of 120 MiB, which is below the threshold. Times of last use have a resolution of one second.
    for name in ["pinned", "oldest", "older"] {
        image(machine, &["pull", name]);
        let pulled = second();
        eventually("the next second", 5, || second() > pulled);
    }
    start(&cluster, "used");
    assert_eq!(
        images(machine),
        [("older", false), ("oldest", false), ("pinned", true), ("used", false)].map(own)
    );

    // Usage is above the threshold. Only as many images are removed as necessary.
    start(&cluster, "fresh");
    eventually("the least recently used image to be removed", 20, || {
        names(machine) == ["fresh", "older", "pinned", "used"]
    });

    // After the pod's container is removed, its image is unused, but it stays until a pull needs the space.
    cluster.kubectl(&["delete", "pod", "fresh", "--wait"]);
    eventually("its container to be removed", 20, || containers(machine) == 1);
    assert_eq!(names(machine), ["fresh", "older", "pinned", "used"]);
    start(&cluster, "big");
    assert_eq!(names(machine), ["big", "pinned", "used"]);
    let events =
        cluster.kubectl(&["get", "events", "--field-selector", "involvedObject.name=big", "-o", "json"]);
    assert!(
        events.to_lowercase().contains("no space left on device"),
        "the first pull of the image did not fail: {events}"
    );

    // Above the threshold again, without removable images: the node reports an event.
    eventually("the event", 20, || {
        let events = cluster.get(&["events", "--field-selector", "involvedObject.kind=Node"]);
        let found =
            events["items"].as_array().unwrap().iter().find(|e| e["reason"] == "FreeDiskSpaceFailed")?;
        let message = found["message"].as_str().unwrap();
        assert!(message.contains("of 120.0 MiB used"), "{message}");
        assert_eq!(found["involvedObject"]["name"], "node-1");
        Some(())
    });
    assert_eq!(names(machine), ["big", "pinned", "used"]);

    // A request with the name of a pinned image removes it.
    image(machine, &["rm", "pinned"]);
    assert_eq!(names(machine), ["big", "used"]);
    cluster.down();
    drop((disk, cluster));
}

fn own((name, pinned): (&str, bool)) -> (String, bool) {
    (name.to_owned(), pinned)
}

#[test]
fn unused_images_are_removed_when_the_disk_fills() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        for (name, megabytes) in
            [("pinned", 20), ("oldest", 20), ("older", 20), ("used", 20), ("fresh", 20), ("big", 50)]
        {
            machine.push_image(name, megabytes);
        }
        test(machine, &mirrors);
    });
}
