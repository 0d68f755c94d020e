//! Mirrors that give something else than what was asked for, and those that do not have it.

use std::path::Path;
use std::sync::Mutex;

use tempfile::TempDir;

use super::{entries, nothing_left, opened};
use crate::digest::Digest;
use crate::fixture::{Fault, Line, TestImage, TestRegistry, TestTar, layer, noise};
use crate::{ErrorKind, Images, ImagesConfig};

const DOMAIN: &str = "registry.example";
const SIZE: usize = 3 << 20;

fn image() -> TestImage {
    TestImage::new(vec![layer(TestTar::new().file("noise", &noise(SIZE)))])
}

/// A store that asks these for what is at `DOMAIN`, the registry itself being the last of them.
async fn mirrored(root: &Path, lines: &[&Line]) -> (Images, TempDir) {
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
        // What arrives is kept, so that what must not be kept could be.
        resume_from: 1 << 20,
        ..ImagesConfig::new(root)
    };
    (opened(&config).await, hosts)
}

/// Spoils a byte of every answer to a GET whose first line has this.
async fn spoiling(registry: &TestRegistry, part: &str, at: usize) -> Line {
    let part = part.to_owned();
    Line::to(registry.address(), move |head, _| {
        let first = head.lines().next().unwrap();
        if first.starts_with("GET") && first.contains(&part) { Fault::Flip(at) } else { Fault::Pass }
    })
    .await
}

async fn good(registry: &TestRegistry) -> Line {
    Line::to(registry.address(), |_, _| Fault::Pass).await
}

async fn without(registry: &TestRegistry) -> Line {
    let none = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    Line::to(registry.address(), |_, _| Fault::Reply(none.into())).await
}

async fn pull(images: &Images) -> Result<(), (ErrorKind, String)> {
    let pulled = images.pull(&format!("{DOMAIN}/big"), None, None).await;
    let pulled = pulled.map_err(|error| (error.kind(), error.report()))?;
    assert_eq!(std::fs::read(pulled.layers[0].join("noise")).unwrap(), noise(SIZE));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_mirror_spoils_comes_from_the_next_host_and_from_its_beginning() {
    let registry = TestRegistry::start().await;
    let image = image();
    let manifest = registry.push("big", "latest", &image).await.to_string();
    let (config, blob) = (Digest::of(&image.config).to_string(), Digest::of(&image.layers[0]).to_string());
    // Noticed by the decoder at once, and at its end, and by the digest alone: the name of a system in gzip's header.
    for (part, at) in [(&blob, 0), (&blob, 1_000_000), (&blob, 9), (&config, 5), (&manifest, 9)] {
        let root = tempfile::tempdir().unwrap();
        let (mirror, server) = (spoiling(&registry, part, at).await, good(&registry).await);
        let (images, _hosts) = mirrored(root.path(), &[&mirror, &server]).await;
        let name = format!("{DOMAIN}/big@{manifest}");
        let pulled = images.pull(&name, None, None).await.map_err(|error| error.report()).unwrap();
        assert_eq!(std::fs::read(pulled.layers[0].join("noise")).unwrap(), noise(SIZE), "{part} {at}");
        assert_eq!((mirror.count(part), server.count(part)), (1, 1), "{part} {at}");
        assert!(server.seen().iter().all(|head| !head.contains("range:")), "{:?}", server.seen());
        assert_eq!(entries(&root.path().join("images/resume")), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mirror_that_has_a_page_for_whoever_asks_is_passed_by() {
    let registry = TestRegistry::start().await;
    let image = image();
    registry.push("big", "latest", &image).await;
    for (head, body, asked) in [
        ("content-length: 7", "<html/>", 1),
        // Without its length it is found out by what it is.
        ("transfer-encoding: chunked", "7\r\n<html/>\r\n0\r\n\r\n", 7),
    ] {
        let root = tempfile::tempdir().unwrap();
        let (page, blob) =
            (format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n{body}"), Digest::of(&image.layers[0]).to_string());
        let part = blob.clone();
        let mirror = Line::to(registry.address(), move |head, _| {
            if head.contains(&part) { Fault::Reply(page.clone()) } else { Fault::Pass }
        })
        .await;
        let server = good(&registry).await;
        let (images, _hosts) = mirrored(root.path(), &[&mirror, &server]).await;
        pull(&images).await.unwrap();
        assert!(mirror.count(&blob) <= asked, "{head}: {:?}", mirror.seen());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tag_that_a_mirror_gives_with_other_bytes_than_it_says_is_asked_of_the_next() {
    let registry = TestRegistry::start().await;
    let image = image();
    registry.push("big", "latest", &image).await;
    let root = tempfile::tempdir().unwrap();
    // In the document's own type, which is not looked at: it would be read without any complaint.
    let at = image.manifest.windows(12).position(|bytes| bytes == b"distribution").unwrap();
    let (mirror, server) = (spoiling(&registry, "/manifests/latest", at).await, good(&registry).await);
    let (images, _hosts) = mirrored(root.path(), &[&mirror, &server]).await;
    pull(&images).await.unwrap();
    assert_eq!((mirror.count("/manifests/latest"), server.count("/manifests/latest")), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn when_all_hosts_spoil_it_each_is_named_with_what_it_gave() {
    let registry = TestRegistry::start().await;
    let image = image();
    let manifest = registry.push("big", "latest", &image).await.to_string();
    let (config, blob) = (Digest::of(&image.config).to_string(), Digest::of(&image.layers[0]).to_string());
    for (part, at) in [(&blob, 1_000_000), (&config, 5), (&manifest, 9)] {
        let root = tempfile::tempdir().unwrap();
        let lines = [spoiling(&registry, part, at).await, spoiling(&registry, part, at + 1).await];
        let absent = without(&registry).await;
        let (images, _hosts) = mirrored(root.path(), &[&lines[0], &absent, &lines[1]]).await;
        let name = format!("{DOMAIN}/big@{manifest}");
        let error = images.pull(&name, None, None).await.unwrap_err();
        let report = error.report();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{report}");
        for line in &lines {
            let said = format!("{}?ns={DOMAIN} has the digest", line.name(&format!("v2/big/x/{part}")));
            let said = said.replace("/x/", if *part == manifest { "/manifests/" } else { "/blobs/" });
            assert!(report.contains(&said), "{said} is not in {report}");
        }
        assert!(report.contains(absent.address()) && report.contains("404"), "{report}");
        nothing_left(root.path()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn when_it_is_unknown_whose_part_is_wrong_each_is_asked_for_all_of_it() {
    let registry = TestRegistry::start().await;
    let image = image();
    registry.push("big", "latest", &image).await;
    let blob = Digest::of(&image.layers[0]).to_string();
    let root = tempfile::tempdir().unwrap();
    let none =
        Fault::Reply("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".into());
    let (part, faults) = (blob.clone(), Mutex::new(vec![none, Fault::Cut(1_000_000)]));
    let mirror = Line::to(registry.address(), move |head, _| {
        let cut = head.contains(&part).then(|| faults.lock().unwrap().pop()).flatten();
        cut.unwrap_or(Fault::Pass)
    })
    .await;
    let server = spoiling(&registry, &blob, 9_000).await;
    let (images, _hosts) = mirrored(root.path(), &[&mirror, &server]).await;
    pull(&images).await.unwrap();
    let ranges = |line: &Line| line.seen().iter().filter(|head| head.contains("range:")).count();
    assert_eq!((mirror.count(&blob), ranges(&mirror)), (3, 1), "{:?}", mirror.seen());
    assert_eq!((server.count(&blob), ranges(&server)), (1, 1), "{:?}", server.seen());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_is_bad_in_the_image_itself_is_asked_for_once() {
    let registry = TestRegistry::start().await;
    let bad = layer(TestTar::new().file("noise", &noise(SIZE)).file("../evil", b""));
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
async fn the_registry_is_asked_after_however_many_mirrors_that_have_nothing() {
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
