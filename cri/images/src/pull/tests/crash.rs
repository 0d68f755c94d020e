//! Pulls on a full disk, pulls whose process is killed, and pulls after damage to the store.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::{entries, nothing_left, store};
use crate::fixture::{TestImage, TestRegistry, TestTar, layer, random_bytes};
use crate::{ErrorKind, Images};

const SMALL_DISK: &str = "CORACLE_TEST_SMALL_DISK";
const PULL_IN_LOOP: &str = "CORACLE_TEST_PULL";

/// Two layers of many files, and the files' contents.
fn image() -> (TestImage, Vec<(String, Vec<u8>)>) {
    let bytes = random_bytes(6 << 20);
    let files: Vec<(String, Vec<u8>)> =
        bytes.chunks(64 << 10).enumerate().map(|(at, data)| (format!("f{at}"), data.to_vec())).collect();
    let tar = |files: &[(String, Vec<u8>)]| {
        layer(files.iter().fold(TestTar::new(), |tar, (name, data)| tar.file(name, data)))
    };
    let (first, second) = files.split_at(files.len() / 2);
    (TestImage::new(vec![tar(first), tar(second)]), files)
}

/// A command that runs this test in a separate process.
fn this_executable(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", &format!("pull::tests::crash::{test}")])
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_reported_and_nothing_is_left() {
    let Ok(root) = std::env::var(SMALL_DISK) else {
        let mount_point = tempfile::tempdir().unwrap();
        let status = Command::new("unshare")
            .args([
                "--mount",
                "sh",
                "-c",
                "mount -t tmpfs -o size=5m small \"$1\" && shift && exec \"$@\"",
                "sh",
            ])
            .arg(mount_point.path())
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "pull::tests::crash::a_full_disk_is_reported_and_nothing_is_left"])
            .env(SMALL_DISK, mount_point.path())
            .status();
        assert!(status.unwrap().success());
        return;
    };
    let registry = TestRegistry::start().await;
    registry
        .push(
            "large",
            "latest",
            &TestImage::new(vec![layer(TestTar::new().file("noise", &random_bytes(8 << 20)))]),
        )
        .await;
    registry.push("several", "latest", &image().0).await;
    registry.push("small", "latest", &TestImage::small("x")).await;
    let images = store(Path::new(&root)).await;
    for name in ["large", "several"] {
        let error = images.pull(&registry.name(name), None, None).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{}", error.report());
        nothing_left(Path::new(&root)).await;
        assert_eq!(entries(&Path::new(&root).join("images/resume")), 0);
    }
    images.pull(&registry.name("small"), None, None).await.unwrap();
}

fn assert_complete(images: &Images, files: &[(String, Vec<u8>)]) {
    for image in images.list() {
        for (name, data) in files {
            let found = image.layers.iter().find_map(|layer| std::fs::read(layer.join(name)).ok());
            assert!(found.as_ref() == Some(data), "{name} is missing or has other content");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_killed_at_any_moment_leaves_no_incomplete_layer() {
    if let Ok(job) = std::env::var(PULL_IN_LOOP) {
        let (root, name) = job.split_once('|').unwrap();
        let images = store(Path::new(root)).await;
        loop {
            images.pull(name, None, None).await.unwrap();
            images.remove(name).await.unwrap();
        }
    }
    let registry = TestRegistry::start().await;
    let (image, files) = image();
    registry.push("app", "latest", &image).await;
    let root = tempfile::tempdir().unwrap();
    let name = registry.name("app");
    for moment in 0..14 {
        let mut child = this_executable("a_process_killed_at_any_moment_leaves_no_incomplete_layer")
            .env(PULL_IN_LOOP, format!("{}|{name}", root.path().display()))
            .spawn()
            .unwrap();
        tokio::time::sleep(Duration::from_millis(40 + 37 * moment)).await;
        child.kill().unwrap();
        child.wait().unwrap();
        let images = store(root.path()).await;
        assert_complete(&images, &files);
        assert_eq!(entries(&root.path().join("images/partial")), 0);
    }
    let images = store(root.path()).await;
    images.pull(&name, None, None).await.unwrap();
    assert_complete(&images, &files);
    images.remove(&name).await.unwrap();
    assert!(images.list().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_with_damaged_metadata_is_dropped_and_fetched_again() {
    let registry = TestRegistry::start().await;
    registry.push("app", "latest", &TestImage::small("x")).await;
    let root = tempfile::tempdir().unwrap();
    let damages: [fn(&Path); 5] = [
        |layer| std::fs::remove_file(layer.join("complete")).unwrap(),
        |layer| std::fs::write(layer.join("complete"), "").unwrap(),
        |layer| {
            let mark = std::fs::read(layer.join("complete")).unwrap();
            std::fs::write(layer.join("complete"), &mark[..mark.len() / 2]).unwrap();
        },
        |layer| std::fs::write(layer.join("complete"), [0; 200]).unwrap(),
        |layer| std::fs::remove_dir_all(layer.join("fs")).unwrap(),
    ];
    for damage in damages {
        let images = store(root.path()).await;
        let pulled = images.pull(&registry.name("app"), None, None).await.unwrap();
        drop(images);
        damage(pulled.layers[0].parent().unwrap());
        let images = store(root.path()).await;
        assert!(images.list().is_empty());
        images.pull(&registry.name("app"), None, None).await.unwrap();
        assert_eq!(std::fs::read(pulled.layers[0].join("hello")).unwrap(), b"x");
    }
}
