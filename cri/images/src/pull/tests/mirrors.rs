//! Mirrors with wrong content, and mirrors without the image.

use std::path::Path;
use std::sync::Mutex;

use tempfile::TempDir;

use super::{entries, nothing_left, opened};
use crate::digest::Digest;
use crate::fixture::{ProxyFault, TestImage, TestProxy, TestRegistry, TestTar, layer, random_bytes};
use crate::{ErrorKind, Images, ImagesConfig};

const DOMAIN: &str = "registry.example";
const SIZE: usize = 3 << 20;

fn image() -> TestImage {
    TestImage::new(vec![layer(TestTar::new().file("noise", &random_bytes(SIZE)))])
}

/// A store that uses these proxies for `DOMAIN`. The last proxy is the registry itself.
async fn mirrored(root: &Path, lines: &[&TestProxy]) -> (Images, TempDir) {
    let hosts = tempfile::tempdir().unwrap();
    std::fs::create_dir(hosts.path().join(DOMAIN)).unwrap();
    let (server, mirrors) = lines.split_last().unwrap();
    let mut text = format!("server = \"http://{}\"\n", server.address());
    for mirror in mirrors {
        text.push_str(&format!("[host.\"http://{}\"]\n", mirror.address()));
    }
    std::fs::write(hosts.path().join(DOMAIN).join("hosts.toml"), text).unwrap();
    let config = ImagesConfig {
        registry_config_dir: Some(hosts.path().to_owned()),
        // All data is spooled, so that the tests detect wrong data that is kept by mistake.
        resume_from: 1 << 20,
        ..ImagesConfig::new(root)
    };
    (opened(&config).await, hosts)
}

/// Changes a byte of every response to a GET whose first line contains `part`.
async fn corrupting(registry: &TestRegistry, part: &str, at: usize) -> TestProxy {
    let part = part.to_owned();
    TestProxy::to(registry.address(), move |head, _| {
        let first = head.lines().next().unwrap();
        if first.starts_with("GET") && first.contains(&part) {
            ProxyFault::Flip(at)
        } else {
            ProxyFault::Pass
        }
    })
    .await
}

async fn good(registry: &TestRegistry) -> TestProxy {
    TestProxy::to(registry.address(), |_, _| ProxyFault::Pass).await
}

async fn without(registry: &TestRegistry) -> TestProxy {
    let none = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    TestProxy::to(registry.address(), |_, _| ProxyFault::Reply(none.into())).await
}

async fn pull(images: &Images) -> Result<(), (ErrorKind, String)> {
    let pulled = images.pull(&format!("{DOMAIN}/big"), None, None).await;
    let pulled = pulled.map_err(|error| (error.kind(), error.report()))?;
    assert_eq!(std::fs::read(pulled.layers[0].join("noise")).unwrap(), random_bytes(SIZE));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn content_damaged_by_a_mirror_is_fetched_completely_from_the_next_host() {
    let registry = TestRegistry::start().await;
    let image = image();
    let manifest = registry.push("big", "latest", &image).await.to_string();
    let (config, blob) = (Digest::of(&image.config).to_string(), Digest::of(&image.layers[0]).to_string());
    // The decoder finds the first two errors, at the beginning and at the end of the blob. Only the digest shows the
    // other errors. Offset 9 of the blob is the OS field of gzip's header.
    for (part, at) in [(&blob, 0), (&blob, 1_000_000), (&blob, 9), (&config, 5), (&manifest, 9)] {
        let root = tempfile::tempdir().unwrap();
        let (mirror, server) = (corrupting(&registry, part, at).await, good(&registry).await);
        let (images, _hosts) = mirrored(root.path(), &[&mirror, &server]).await;
        let name = format!("{DOMAIN}/big@{manifest}");
        let pulled = images.pull(&name, None, None).await.map_err(|error| error.report()).unwrap();
        assert_eq!(std::fs::read(pulled.layers[0].join("noise")).unwrap(), random_bytes(SIZE), "{part} {at}");
        assert_eq!((mirror.count(part), server.count(part)), (1, 1), "{part} {at}");
        assert!(server.requests().iter().all(|head| !head.contains("range:")), "{:?}", server.requests());
        assert_eq!(entries(&root.path().join("images/resume")), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mirror_that_answers_everything_with_a_page_is_skipped() {
    let registry = TestRegistry::start().await;
    let image = image();
    registry.push("big", "latest", &image).await;
    for (head, body, max_requests) in [
        ("content-length: 7", "<html/>", 1),
        // A page without a length is detected by its content.
        ("transfer-encoding: chunked", "7\r\n<html/>\r\n0\r\n\r\n", 7),
    ] {
        let root = tempfile::tempdir().unwrap();
        let (page, blob) =
            (format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n{body}"), Digest::of(&image.layers[0]).to_string());
        let part = blob.clone();
        let mirror = TestProxy::to(registry.address(), move |head, _| {
            if head.contains(&part) { ProxyFault::Reply(page.clone()) } else { ProxyFault::Pass }
        })
        .await;
        let server = good(&registry).await;
        let (images, _hosts) = mirrored(root.path(), &[&mirror, &server]).await;
        pull(&images).await.unwrap();
        assert!(mirror.count(&blob) <= max_requests, "{head}: {:?}", mirror.requests());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_that_does_not_match_its_header_digest_is_fetched_from_the_next_host() {
    let registry = TestRegistry::start().await;
    let image = image();
    registry.push("big", "latest", &image).await;
    let root = tempfile::tempdir().unwrap();
    // The changed byte is in the media type, which is not checked. So only the digest shows the damage.
    let at = image.manifest.windows(12).position(|bytes| bytes == b"distribution").unwrap();
    let (mirror, server) = (corrupting(&registry, "/manifests/latest", at).await, good(&registry).await);
    let (images, _hosts) = mirrored(root.path(), &[&mirror, &server]).await;
    pull(&images).await.unwrap();
    assert_eq!((mirror.count("/manifests/latest"), server.count("/manifests/latest")), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn when_all_hosts_are_wrong_the_error_lists_each_with_its_digest() {
    let registry = TestRegistry::start().await;
    let image = image();
    let manifest = registry.push("big", "latest", &image).await.to_string();
    let (config, blob) = (Digest::of(&image.config).to_string(), Digest::of(&image.layers[0]).to_string());
    for (part, at) in [(&blob, 1_000_000), (&config, 5), (&manifest, 9)] {
        let root = tempfile::tempdir().unwrap();
        let lines = [corrupting(&registry, part, at).await, corrupting(&registry, part, at + 1).await];
        let absent = without(&registry).await;
        let (images, _hosts) = mirrored(root.path(), &[&lines[0], &absent, &lines[1]]).await;
        let name = format!("{DOMAIN}/big@{manifest}");
        let error = images.pull(&name, None, None).await.unwrap_err();
        let report = error.report();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{report}");
        for line in &lines {
            let text = format!("{}?ns={DOMAIN} has the digest", line.name(&format!("v2/big/x/{part}")));
            let text = text.replace("/x/", if *part == manifest { "/manifests/" } else { "/blobs/" });
            assert!(report.contains(&text), "{text} is not in {report}");
        }
        assert!(report.contains(absent.address()) && report.contains("404"), "{report}");
        nothing_left(root.path()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn when_the_wrong_part_is_unknown_each_host_is_asked_for_the_whole_blob() {
    let registry = TestRegistry::start().await;
    let image = image();
    registry.push("big", "latest", &image).await;
    let blob = Digest::of(&image.layers[0]).to_string();
    let root = tempfile::tempdir().unwrap();
    let none =
        ProxyFault::Reply("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".into());
    let (part, faults) = (blob.clone(), Mutex::new(vec![none, ProxyFault::Cut(1_000_000)]));
    let mirror = TestProxy::to(registry.address(), move |head, _| {
        let cut = head.contains(&part).then(|| faults.lock().unwrap().pop()).flatten();
        cut.unwrap_or(ProxyFault::Pass)
    })
    .await;
    let server = corrupting(&registry, &blob, 9_000).await;
    let (images, _hosts) = mirrored(root.path(), &[&mirror, &server]).await;
    pull(&images).await.unwrap();
    let ranges = |line: &TestProxy| line.requests().iter().filter(|head| head.contains("range:")).count();
    assert_eq!((mirror.count(&blob), ranges(&mirror)), (3, 1), "{:?}", mirror.requests());
    assert_eq!((server.count(&blob), ranges(&server)), (1, 1), "{:?}", server.requests());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_is_invalid_in_the_image_is_fetched_once() {
    let registry = TestRegistry::start().await;
    let bad = layer(TestTar::new().file("noise", &random_bytes(SIZE)).file("../evil", b""));
    let image = TestImage::new(vec![bad]);
    registry.push("big", "latest", &image).await;
    let blob = Digest::of(&image.layers[0]).to_string();
    let root = tempfile::tempdir().unwrap();
    let (mirror, server) = (good(&registry).await, good(&registry).await);
    let (images, _hosts) = mirrored(root.path(), &[&mirror, &server]).await;
    let (kind, report) = pull(&images).await.unwrap_err();
    assert_eq!(kind, ErrorKind::Rejected);
    assert!(report.contains("leads out"), "{report}");
    assert_eq!((mirror.count(&blob), server.count(&blob)), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_registry_is_asked_after_any_number_of_mirrors_without_the_image() {
    let registry = TestRegistry::start().await;
    registry.push("big", "latest", &image()).await;
    let root = tempfile::tempdir().unwrap();
    let mut lines = Vec::new();
    for _ in 0..7 {
        lines.push(without(&registry).await);
    }
    lines.push(good(&registry).await);
    let (images, _hosts) = mirrored(root.path(), &lines.iter().collect::<Vec<_>>()).await;
    pull(&images).await.unwrap();
}
