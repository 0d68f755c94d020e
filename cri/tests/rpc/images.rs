//! Concurrent calls of the image service, and their errors.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use coracle_proto::cri;
use coracle_proto::cri::image_service_server::ImageService;
use coracle_testing::until;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tonic::{Code, Request, Status};

use crate::fixture::Machine;

/// A registry that serves the blobs of a layout under any name, with one manifest for all tags. `private` requires a
/// password, `absent` does not exist.
struct Registry {
    address: String,
    task: JoinHandle<()>,
}

impl Registry {
    async fn start(blobs: PathBuf, manifest: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listen");
        let address = listener.local_addr().expect("address").to_string();
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (blobs, manifest) = (blobs.clone(), manifest.clone());
                // A client may disconnect at any time.
                connections.spawn(async move { drop(serve(stream, &blobs, &manifest).await) });
            }
        });
        Self { address, task }
    }

    fn name(&self, rest: &str) -> String {
        format!("{}/{rest}", self.address)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(mut stream: TcpStream, blobs: &Path, manifest: &str) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let mut words = head.split_whitespace();
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let last = path.rsplit('/').next().unwrap_or_default();
    let digest = if path.contains("/manifests/") && !last.starts_with("sha256:") { manifest } else { last };
    let refusal = |status: &str, code: &str| {
        (status.to_owned(), format!(r#"{{"errors":[{{"code":"{code}","message":"no"}}]}}"#).into_bytes())
    };
    let (status, body) = if path.contains("/private/") {
        refusal("401 Unauthorized", "UNAUTHORIZED")
    } else if path.contains("/absent/") {
        refusal("404 Not Found", "MANIFEST_UNKNOWN")
    } else {
        ("200 OK".to_owned(), std::fs::read(blobs.join(digest.trim_start_matches("sha256:")))?)
    };
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-length: {}\r\ndocker-content-digest: {digest}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    if method != "HEAD" {
        stream.write_all(&body).await?;
    }
    stream.shutdown().await
}

/// The machine's image with another configuration. Returns the manifest's digest.
fn another_image(blobs: &Path) -> String {
    let read = |digest: &str| -> serde_json::Value {
        let text = std::fs::read(blobs.join(digest.trim_start_matches("sha256:"))).expect("blob");
        serde_json::from_slice(&text).expect("document")
    };
    let put = |document: &serde_json::Value| {
        let text = document.to_string();
        let digest = hex::encode(Sha256::digest(text.as_bytes()));
        std::fs::write(blobs.join(&digest), &text).expect("blob");
        (format!("sha256:{digest}"), text.len())
    };
    let index = std::fs::read(blobs.join("../../index.json")).expect("index");
    let index: serde_json::Value = serde_json::from_slice(&index).expect("document");
    let mut manifest = read(index["manifests"][0]["digest"].as_str().expect("digest"));
    let mut config = read(manifest["config"]["digest"].as_str().expect("digest"));
    config["config"]["Env"] = serde_json::json!(["PATH=/bin", "ANOTHER=image"]);
    // The image's own layer, in addition to the shared layer.
    let tar = blobs.join("../../own.tar");
    std::fs::write(blobs.join("../../own"), "own").expect("file");
    let made =
        Command::new("tar").arg("-C").arg(blobs.join("../..")).arg("-cf").arg(&tar).arg("own").status();
    assert!(made.expect("tar").success());
    let layer = std::fs::read(&tar).expect("layer");
    let digest = hex::encode(Sha256::digest(&layer));
    std::fs::write(blobs.join(&digest), &layer).expect("blob");
    let digest = format!("sha256:{digest}");
    config["rootfs"]["diff_ids"].as_array_mut().expect("layers").push(digest.clone().into());
    let descriptor = serde_json::json!({
        "mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest, "size": layer.len(),
    });
    manifest["layers"].as_array_mut().expect("layers").push(descriptor);
    let (digest, size) = put(&config);
    manifest["config"]["digest"] = digest.into();
    manifest["config"]["size"] = size.into();
    put(&manifest).0
}

fn spec(reference: &str) -> Option<cri::ImageSpec> {
    Some(cri::ImageSpec { image: reference.to_owned(), ..Default::default() })
}

async fn pull(runtime: coracle_cri::Runtime, reference: String) -> Result<String, Status> {
    let request = cri::PullImageRequest { image: spec(&reference), ..Default::default() };
    Ok(runtime.pull_image(Request::new(request)).await?.into_inner().image_ref)
}

async fn remove(runtime: coracle_cri::Runtime, reference: String) -> Result<(), Status> {
    let request = cri::RemoveImageRequest { image: spec(&reference) };
    runtime.remove_image(Request::new(request)).await.map(|_| ())
}

/// All files of the image store.
fn stored(machine: &Machine) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for part in ["manifests", "layers", "partial", "rubbish"] {
        let entries = std::fs::read_dir(machine.path("root/images").join(part)).expect("directory");
        found.extend(entries.map(|entry| entry.expect("entry").path()));
    }
    found.sort();
    found
}

pub(crate) async fn concurrent_removals_pulls_and_creations_are_consistent(machine: &mut Machine) {
    machine.loopback_up();
    let blobs = machine.path("layout/blobs/sha256");
    let manifest = another_image(&blobs);
    let registry = Registry::start(blobs, manifest).await;
    let reference = registry.name("another:latest");
    let pod = machine.pod("images").await;
    let before = stored(machine);
    let (mut created, mut round) = (0, 0);
    // Runs at least twelve rounds. On a slow machine, runs further rounds until one creation is fast enough. Removals
    // begin later in each round.
    while round < 12 || created == 0 {
        assert!(round < 100, "no container was made in time");
        round += 1;
        let id = pull(machine.runtime.clone(), reference.clone()).await.expect("pull");
        let mut calls = JoinSet::new();
        for n in 0..5 {
            let by = if n % 2 == 0 { reference.clone() } else { id.clone() };
            let runtime = machine.runtime.clone();
            calls.spawn(async move {
                tokio::time::sleep(Duration::from_micros(200 * n * round + 10 * round * round)).await;
                remove(runtime, by).await
            });
        }
        if round % 3 == 0 {
            let (runtime, reference) = (machine.runtime.clone(), reference.clone());
            calls.spawn(async move { pull(runtime, reference).await.map(|_| ()) });
        }
        let made = machine.create(&pod, "user", &["cat", "/own"], |config| config.image = spec(&reference));
        match made.await {
            Ok(container) => {
                created += 1;
                while let Some(call) = calls.join_next().await {
                    call.expect("no panic").expect("removed or pulled");
                }
                // The container starts although its image was removed.
                machine.start(&container).await;
                assert_eq!(machine.wait_exited(&container).await.exit_code, 0);
                machine.remove(&container).await;
            }
            Err(status) => assert_eq!(status.code(), Code::NotFound, "{status}"),
        }
        while let Some(call) = calls.join_next().await {
            call.expect("no panic").expect("removed or pulled");
        }
        for _ in 0..2 {
            remove(machine.runtime.clone(), reference.clone()).await.expect("removed already");
        }
        let request = cri::ImageStatusRequest { image: spec(&id), verbose: false };
        let status = machine.runtime.image_status(Request::new(request)).await.expect("status");
        assert_eq!(status.into_inner().image, None);
        until(&format!("round {round}: the store is as before"), 10, || stored(machine) == before).await;
    }
    machine.remove_pod(&pod).await;
}

pub(crate) async fn a_failed_pull_has_the_error_that_the_kubelet_shows(machine: &mut Machine) {
    machine.loopback_up();
    let registry = Registry::start(machine.path("layout/blobs/sha256"), String::new()).await;
    let reserved = coracle_testing::ClosedPort::reserve();
    let dead = reserved.address();
    for (reference, code, begins, says) in [
        (
            registry.name("absent/app:1"),
            Code::NotFound,
            "cannot use image ",
            "404 Not Found (MANIFEST_UNKNOWN: no)",
        ),
        (
            registry.name("private/app:1"),
            Code::PermissionDenied,
            "pull access denied",
            "401 Unauthorized (UNAUTHORIZED: no)",
        ),
        // The kubelet searches the error for this word only if the code is Unknown.
        (format!("{dead}/app:1"), Code::Unknown, "RegistryUnavailable: ", "cannot reach"),
        ("Not A Name".to_owned(), Code::InvalidArgument, "cannot use image ", "Not A Name"),
    ] {
        let status = pull(machine.runtime.clone(), reference.clone()).await.expect_err("no such image");
        let message = status.message();
        assert_eq!(status.code(), code, "{message}");
        assert!(message.starts_with(begins) && message.contains(says), "{message}");
        assert!(message.contains(&reference), "{message}");
    }
}
