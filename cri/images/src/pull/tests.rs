//! Tests of pulls from a real registry, with and without injected failures.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

mod authorize;
mod crash;
mod digests;
mod foreign;
mod large;
mod links;
mod mirrors;
mod platform;
mod remove;
mod resume;
mod stall;

use coracle_testing::eventually_async;

use crate::digest::Digest;
use crate::fixture::{
    ProxyFault, TestImage, TestProxy, TestRegistry, TestTar, attributes, gzip, layer, random_bytes, zstd,
    zstd_with_large_window,
};
use crate::{ErrorKind, Images, ImagesConfig, ProgressFn, Usage};

/// A timeout that even a slow machine does not reach.
const LONG: Duration = Duration::from_secs(60);
/// Maximum age of a time that the running test has recorded. Other times in these tests are years ago.
const RECENT: Duration = Duration::from_secs(3600);

/// Opens a store. Waits while a task of the previous store in this process still holds the lock.
async fn store(root: &Path) -> Images {
    opened(&ImagesConfig { stall_timeout: Duration::from_secs(5), ..ImagesConfig::new(root) }).await
}

/// Opens a store that may have been dropped just now: its running tasks still hold the lock.
async fn opened(config: &ImagesConfig) -> Images {
    let what = format!("the previous store in {} to end", config.root.display());
    let opening = eventually_async(&what, 10, async || match Images::open(config.clone()).await {
        Err(error) if error.kind() == ErrorKind::Locked => None,
        opened => Some(opened.unwrap_or_else(|error| panic!("{}", error.report()))),
    });
    opening.await
}

fn big_image() -> TestImage {
    TestImage::new(vec![layer(TestTar::new().file("noise", &random_bytes(3 << 20)))])
}

fn entries(path: &Path) -> usize {
    std::fs::read_dir(path).unwrap().count()
}

/// Waits until no file of a failed pull is left: aborted threads may run for a moment.
async fn nothing_left(root: &Path) {
    let images = root.join("images");
    eventually_async("nothing of a failed pull is left", 10, async || {
        ["layers", "partial", "rubbish", "manifests"].iter().all(|d| entries(&images.join(d)) == 0)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_with_large_zstd_windows_need_the_only_permit() {
    let registry = TestRegistry::start().await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let wide = |name: &str| {
        let tar = TestTar::new().file(name, b"x").finish();
        (zstd_with_large_window(&tar), Digest::of(&tar))
    };
    registry.push("a/wide", "v1", &TestImage::new(vec![wide("a"), wide("b"), wide("c")])).await;
    registry.push("a/other", "v1", &TestImage::new(vec![wide("d")])).await;
    registry.push("a/small", "v1", &TestImage::new(vec![layer(TestTar::new().file("e", b""))])).await;
    let pulled = images.pull(&registry.name("a/wide:v1"), None, None).await.unwrap();
    assert_eq!(std::fs::read(pulled.layers[0].join("c")).unwrap(), b"x");
    let held = images.inner.large_window.acquire("").await.unwrap();
    let other = tokio::spawn({
        let (images, name) = (images.clone(), registry.name("a/other:v1"));
        async move { images.pull(&name, None, None).await }
    });
    let waits = async || images.inner.large_window.held_and_waiting() == (1, 1);
    eventually_async("one pull has the permit and one waits", 10, waits).await;
    assert!(images.pull(&registry.name("a/small:v1"), None, None).await.is_ok());
    assert!(!other.is_finished());
    drop(held);
    assert!(other.await.unwrap().is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_registries_of_two_owners_do_not_stop_the_pulls_of_a_third() {
    let registry = TestRegistry::start().await;
    let slow = TestProxy::to(registry.address(), |head, _| match head.contains("/blobs/") {
        true => ProxyFault::Drip(3000),
        false => ProxyFault::Pass,
    })
    .await;
    let root = tempfile::tempdir().unwrap();
    let config =
        ImagesConfig { fetch_time_slice: Duration::from_millis(10), ..ImagesConfig::new(root.path()) };
    let images = opened(&config).await;
    let mut pulls = tokio::task::JoinSet::new();
    for (owner, number) in [("a", 0), ("a", 1), ("b", 2), ("b", 3)] {
        let layers = (0..3).map(|n| layer(TestTar::new().file("f", &random_bytes(10_000 + number * 10 + n))));
        let image = TestImage::new(layers.collect());
        registry.push(&format!("slow{number}"), "latest", &image).await;
        let (images, name) = (images.clone(), slow.name(&format!("slow{number}")));
        pulls.spawn(async move { images.pull_for(owner, &name, None, None).await });
    }
    let waits = async || matches!(images.inner.fetch_slots.held_and_waiting(), (8, 1..));
    eventually_async("all slots are held and a pull waits", 10, waits).await;
    registry.push("good", "latest", &big_image()).await;
    let name = registry.name("good");
    let good = tokio::time::timeout(LONG, images.pull_for("c", &name, None, None)).await;
    assert!(good.expect("a pull of another owner").is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_pulled_unpacked_found_and_removed() {
    let registry = TestRegistry::start().await;
    let root = tempfile::tempdir().unwrap();
    let plain = TestTar::new().file("plain", b"plain").finish();
    let squeezed = TestTar::new().file("squeezed", b"zstd").finish();
    let image = TestImage::new(vec![
        layer(TestTar::new().directory("d").file("d/one", b"1")),
        (plain.clone(), Digest::of(&plain)),
        (zstd(&squeezed), Digest::of(&squeezed)),
        layer(TestTar::new().file("d/.wh.one", b"")),
    ]);
    let digest = registry.push("a/b", "v1", &image).await;
    let images = store(root.path()).await;
    let name = registry.name("a/b:v1");
    let updates = Arc::new(Mutex::new(Vec::new()));
    let on_progress: ProgressFn = {
        let updates = updates.clone();
        Arc::new(move |p| updates.lock().unwrap().push(p.clone()))
    };
    let pulled = images.pull(&name, None, Some(on_progress)).await.unwrap();
    assert_eq!(
        (pulled.id.as_str(), pulled.tags.as_slice()),
        (image.id().as_str(), [name.clone()].as_slice())
    );
    assert_eq!(pulled.digests, [format!("{}@{digest}", registry.name("a/b"))]);
    assert_eq!(
        (pulled.env(), pulled.cmd()),
        (["A=b".to_owned()].as_slice(), ["/bin/true".to_owned()].as_slice())
    );
    assert_eq!(pulled.layers.len(), 4);
    assert_eq!(std::fs::read(pulled.layers[3].join("d/one")).unwrap(), b"1");
    assert_eq!(std::fs::read(pulled.layers[1].join("squeezed")).unwrap(), b"zstd");
    let last = updates.lock().unwrap().last().cloned().unwrap();
    assert_eq!((last.layers_done, last.layers_total, last.bytes_done), (4, 4, last.bytes_total));
    let by_digest = pulled.digests[0].clone();
    for known in [&name, &by_digest, &pulled.id] {
        assert_eq!(images.get(known).map(|i| i.id), Some(pulled.id.clone()), "{known}");
    }
    assert!(images.usage().bytes > 0);
    drop(images);
    let images = store(root.path()).await;
    assert_eq!(images.list().len(), 1);
    images.remove(&by_digest).await.unwrap();
    images.remove(&by_digest).await.unwrap();
    assert!(images.list().is_empty());
    images.wait_until_deleted().await;
    assert_eq!(images.usage(), Usage::default());
    nothing_left(root.path()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn absent_images_are_reported_as_not_found() {
    let registry = TestRegistry::start().await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let error = images.pull(&registry.name("no/such:tag"), None, None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let report = error.report();
    assert!(
        report.contains("no/such:tag") && report.contains("404") && report.contains("MANIFEST_UNKNOWN"),
        "{report}"
    );
    assert_eq!(images.pull("Not A Name", None, None).await.unwrap_err().kind(), ErrorKind::InvalidReference);
    let address = registry.address().to_owned();
    drop(registry);
    let error = images.pull(&format!("{address}/a:b"), None, None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.report().contains("cannot reach"), "{}", error.report());
    nothing_left(root.path()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_transfer_is_resumed_where_it_broke() {
    let registry = TestRegistry::start().await;
    let image = big_image();
    registry.push("big", "latest", &image).await;
    for fault in [ProxyFault::Cut(1_000_000), ProxyFault::Stall(1_000_000)] {
        let root = tempfile::tempdir().unwrap();
        let images = store(root.path()).await;
        let (blob, once) = (Digest::of(&image.layers[0]).to_string(), Mutex::new(Some(fault)));
        let line = TestProxy::to(registry.address(), move |head, _| {
            let fault = head.contains(&blob).then(|| once.lock().unwrap().take()).flatten();
            fault.unwrap_or(ProxyFault::Pass)
        })
        .await;
        let pulled = images.pull(&line.name("big"), None, None).await.unwrap();
        assert_eq!(std::fs::read(pulled.layers[0].join("noise")).unwrap(), random_bytes(3 << 20));
        let ranges: Vec<String> = line
            .requests()
            .iter()
            .filter_map(|h| h.split("range: bytes=").nth(1).map(str::to_owned))
            .collect();
        assert_eq!(ranges.len(), 1, "{:?}", line.requests());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_without_ranges_is_asked_for_the_whole_layer() {
    let registry = TestRegistry::start().await;
    let image = big_image();
    registry.push("big", "latest", &image).await;
    let wrong = |head: &str| format!("HTTP/1.1 {head}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    for answer in [
        wrong("416 Range Not Satisfiable"),
        wrong("206 Partial Content\r\ncontent-range: bytes 3000000-3000000/3000001"),
        wrong("206 Partial Content"),
    ] {
        let root = tempfile::tempdir().unwrap();
        let images = store(root.path()).await;
        let (blob, once) =
            (Digest::of(&image.layers[0]).to_string(), Mutex::new(Some(ProxyFault::Cut(1_000_000))));
        let line = TestProxy::to(registry.address(), move |head, _| match head.contains("range: bytes=") {
            true => ProxyFault::Reply(answer.clone()),
            false => {
                let fault = head.contains(&blob).then(|| once.lock().unwrap().take()).flatten();
                fault.unwrap_or(ProxyFault::Pass)
            }
        })
        .await;
        let pulled =
            images.pull(&line.name("big"), None, None).await.map_err(|error| error.report()).unwrap();
        assert_eq!(std::fs::read(pulled.layers[0].join("noise")).unwrap(), random_bytes(3 << 20));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_from_a_broken_registry_fails_and_leaves_nothing_incomplete() {
    let registry = TestRegistry::start().await;
    let image = big_image();
    registry.push("big", "latest", &image).await;
    let config_blob = Digest::of(&image.config).to_string();
    let manifest_unavailable = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n";
    type Rule = Box<dyn Fn(&str, usize) -> ProxyFault + Send + Sync>;
    let with_fault = |fault: ProxyFault| -> Rule {
        let config_blob = config_blob.clone();
        Box::new(move |head, _| {
            let is_layer = head.contains("/blobs/") && !head.contains(&config_blob);
            if is_layer { fault.clone() } else { ProxyFault::Pass }
        })
    };
    let cases: Vec<(Rule, ErrorKind, &str)> = vec![
        (with_fault(ProxyFault::Cut(2_000)), ErrorKind::Unavailable, "was interrupted"),
        (with_fault(ProxyFault::Flip(1_000_000)), ErrorKind::Corrupt, "digest"),
        (
            with_fault(ProxyFault::Reply("HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".into())),
            ErrorKind::NotFound,
            "404",
        ),
        (Box::new(move |_, _| ProxyFault::Reply(manifest_unavailable.into())), ErrorKind::Unavailable, "503"),
        (Box::new(|_, _| ProxyFault::Stall(0)), ErrorKind::Unavailable, "sent no data within the timeout"),
    ];
    for (rule, kind, part) in cases {
        let root = tempfile::tempdir().unwrap();
        let images = store(root.path()).await;
        let line = TestProxy::to(registry.address(), rule).await;
        let error = images.pull(&line.name("big"), None, None).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{}", error.report());
        assert!(error.report().contains(part), "{}", error.report());
        nothing_left(root.path()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_temporary_failure_of_the_registry_is_retried() {
    let registry = TestRegistry::start().await;
    registry.push("small", "latest", &TestImage::small("x")).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let line = TestProxy::to(registry.address(), |_, number| match number % 2 {
        0 => ProxyFault::Reply("HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n".into()),
        _ => ProxyFault::Pass,
    })
    .await;
    images.pull(&line.name("small"), None, None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_pulls_are_merged_and_shared_layers_are_fetched_once() {
    let registry = TestRegistry::start().await;
    let shared = layer(TestTar::new().file("shared", &random_bytes(1 << 20)));
    let one = TestImage::new(vec![shared.clone(), layer(TestTar::new().file("one", b"1"))]);
    let two = TestImage::new(vec![shared.clone(), layer(TestTar::new().file("two", b"2"))]);
    registry.push("r", "one", &one).await;
    registry.push("r", "two", &two).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let line = TestProxy::to(registry.address(), |_, _| ProxyFault::Pass).await;
    let (name_one, name_two) = (line.name("r:one"), line.name("r:two"));
    let pulls = tokio::join!(
        images.pull(&name_one, None, None),
        images.pull(&name_one, None, None),
        images.pull(&name_two, None, None),
    );
    let (a, b, c) = (pulls.0.unwrap(), pulls.1.unwrap(), pulls.2.unwrap());
    assert_eq!((&a.id, &a.layers[1]), (&b.id, &c.layers[1]));
    assert_eq!(line.count(&Digest::of(&shared.0).to_string()), 1);
    assert_eq!(line.count("/manifests/one"), 1);
    images.remove(&name_one).await.unwrap();
    assert!(c.layers[1].join("shared").is_file() && !a.layers[0].exists());
    images.remove(&name_two).await.unwrap();
    nothing_left(root.path()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_without_a_caller_stops() {
    let registry = TestRegistry::start().await;
    registry.push("big", "latest", &big_image()).await;
    let root = tempfile::tempdir().unwrap();
    let config = ImagesConfig { stall_timeout: Duration::from_secs(60), ..ImagesConfig::new(root.path()) };
    let images = Images::open(config).await.unwrap();
    let line = TestProxy::to(registry.address(), |head, _| match head.contains("/blobs/") {
        true => ProxyFault::Stall(1_000_000),
        false => ProxyFault::Pass,
    })
    .await;
    let name = line.name("big");
    let blob = Digest::of(&big_image().layers[0]).to_string();
    let partial = root.path().join("images/partial");
    let is_unpacking = || line.count(&blob) > 0 && entries(&partial) > 0;
    tokio::select! {
        pulled = images.pull(&name, None, None) => panic!("the pull ended: {}", pulled.is_ok()),
        () = coracle_testing::until("the layer is unpacked", 20, is_unpacking) => {}
    }
    nothing_left(root.path()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_moved_tag_leaves_the_old_image_and_held_layers_stay() {
    let registry = TestRegistry::start().await;
    let (old, new) = (TestImage::small("old"), TestImage::small("new"));
    let old_digest = registry.push("app", "latest", &old).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let name = registry.name("app");
    let first = images.pull(&name, None, None).await.unwrap();
    registry.push("app", "latest", &new).await;
    images.pull(&name, None, None).await.unwrap();
    let left = images.get(&first.id).unwrap();
    assert_eq!((left.tags.len(), left.digests.as_slice()), (0, [format!("{name}@{old_digest}")].as_slice()));
    assert_eq!(images.get(&name).unwrap().id, new.id());
    let held = images.hold(&first.id).unwrap();
    images.remove(&first.id).await.unwrap();
    assert!(images.get(&first.id).is_none() && first.layers[0].join("hello").is_file());
    drop(held);
    eventually_async("the layer is removed", 10, async || !first.layers[0].exists()).await;
    assert!(images.hold(&first.id).is_err());
    assert_eq!(images.list().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_removed_while_held_can_be_held_again_after_a_restart() {
    let registry = TestRegistry::start().await;
    registry.push("app", "latest", &TestImage::small("x")).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let image = images.pull(&registry.name("app"), None, None).await.unwrap();
    let held = images.hold(&image.id).unwrap();
    images.remove(&image.id).await.unwrap();
    // Simulates a killed process: nothing is dropped, and a copy of the state is opened.
    let copy = tempfile::tempdir().unwrap();
    let copied =
        std::process::Command::new("cp").arg("-a").arg(root.path().join("images")).arg(copy.path()).status();
    assert!(copied.unwrap().success());
    let again = store(copy.path()).await;
    assert!(again.list().is_empty());
    let held_again = again.hold(&image.id).unwrap();
    again.collect().await.unwrap();
    assert!(held_again.image().layers[0].join("hello").is_file());
    let path = held_again.image().layers[0].clone();
    // Another pull adds the removed image again.
    again.pull(&registry.name("app"), None, None).await.unwrap();
    drop(held_again);
    assert_eq!(again.list().len(), 1);
    assert!(path.join("hello").is_file());
    drop(held);
    nothing_left(root.path()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pinned_image_is_marked_and_can_be_removed_explicitly() {
    let registry = TestRegistry::start().await;
    registry.push("app", "latest", &TestImage::small("x")).await;
    let root = tempfile::tempdir().unwrap();
    let mut config = ImagesConfig::new(root.path());
    config.pinned = vec!["*app:kept*".parse().unwrap()];
    let images = opened(&config).await;
    assert!(!images.pull(&registry.name("app"), None, None).await.unwrap().pinned);
    registry.push("app", "kept", &TestImage::small("x")).await;
    let image = images.pull(&registry.name("app:kept"), None, None).await.unwrap();
    assert!(image.pinned && image.tags.len() == 2);
    drop(images);
    let images = opened(&config).await;
    assert!(images.list()[0].pinned);
    drop(images);
    let images = opened(&ImagesConfig { pinned: Vec::new(), ..config.clone() }).await;
    assert!(!images.list()[0].pinned, "the setting is not recorded with the image");
    drop(images);
    let images = opened(&config).await;
    images.remove(&image.id).await.unwrap();
    assert_eq!(images.list().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_time_of_last_use_survives_a_restart() {
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    let registry = TestRegistry::start().await;
    for tag in ["used", "unused"] {
        registry.push("app", tag, &TestImage::small(tag)).await;
    }
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let mut ids = Vec::new();
    for tag in ["app:used", "app:unused"] {
        ids.push(images.pull(&registry.name(tag), None, None).await.unwrap().id);
    }
    let pulled = images.gc_info(&ids[0]).unwrap();
    assert!(pulled.pulled.elapsed().unwrap() < RECENT && !pulled.held);
    assert!(pulled.layer_bytes.len() == 1 && pulled.layer_bytes[0] > 0);
    drop(images);
    for record in std::fs::read_dir(root.path().join("images/manifests")).unwrap() {
        std::fs::File::open(record.unwrap().path()).unwrap().set_modified(long_ago).unwrap();
    }
    let images = store(root.path()).await;
    assert_eq!(ids.iter().map(|id| images.gc_info(id).unwrap().used).max(), Some(long_ago));
    let held = images.hold(&ids[0]).unwrap();
    assert!(images.gc_info(&ids[0]).unwrap().held);
    drop((held, images));
    eventually_async("the time of the last use to be recorded", 10, async || {
        // The first store closes only after its task has recorded the use.
        let images = store(root.path()).await;
        let [used, unused] = [0, 1].map(|at| images.gc_info(&ids[at]).unwrap());
        assert_eq!(unused.used, long_ago);
        assert!(unused.pulled.elapsed().unwrap() < RECENT, "a pull does not count as a use");
        used.used.elapsed().unwrap() < RECENT
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_layers_are_refused_with_the_reason_and_nothing_is_kept() {
    let registry = TestRegistry::start().await;
    let wrong = (gzip(&TestTar::new().file("a", b"").finish()), Digest::of(b"something else"));
    let cases = [
        ("climbs", layer(TestTar::new().file("../evil", b"")), ErrorKind::Rejected, "leads out"),
        (
            "links",
            layer(TestTar::new().hard_link("h", "/etc/passwd")),
            ErrorKind::Rejected,
            "is not a file of",
        ),
        ("lies", wrong, ErrorKind::Corrupt, "unpacks to"),
        (
            "noise",
            (random_bytes(5000), Digest::of(&random_bytes(5000))),
            ErrorKind::Corrupt,
            "not a tar archive",
        ),
    ];
    for (name, bad, kind, part) in cases {
        let root = tempfile::tempdir().unwrap();
        let images = store(root.path()).await;
        let good = layer(TestTar::new().file("good", &random_bytes(300_000)));
        registry.push(name, "latest", &TestImage::new(vec![good, bad])).await;
        let error = images.pull(&registry.name(name), None, None).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{}", error.report());
        assert!(error.report().contains(part), "{}", error.report());
        nothing_left(root.path()).await;
    }
}

/// CVE-2021-20291: a layer that was not an archive stopped all later pulls.
#[tokio::test(flavor = "multi_thread")]
async fn cve_2021_20291_broken_layers_do_not_stop_later_pulls() {
    let registry = TestRegistry::start().await;
    let shared = layer(TestTar::new().file("good", &random_bytes(300_000)));
    let noise = (random_bytes(5000), Digest::of(&random_bytes(5000)));
    registry.push("broken", "latest", &TestImage::new(vec![shared.clone(), noise])).await;
    registry.push("good", "latest", &TestImage::new(vec![shared])).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let pull = async |name: &str| {
        let pulled = tokio::time::timeout(LONG, images.pull(&registry.name(name), None, None)).await;
        pulled.expect("a pull ends")
    };
    // The number of pulls exceeds the number of layers that are fetched at a time.
    for _ in 0..10 {
        assert_eq!(pull("broken").await.unwrap_err().kind(), ErrorKind::Corrupt);
    }
    assert_eq!(pull("good").await.map_err(|error| error.report()).unwrap().layers.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn unusual_images_have_layers_that_overlayfs_accepts() {
    let registry = TestRegistry::start().await;
    let (a, b) = (layer(TestTar::new().file("a", b"")), layer(TestTar::new().file("b", b"")));
    registry.push("twice", "latest", &TestImage::new(vec![a.clone(), b, a])).await;
    registry.push("none", "latest", &TestImage::new(vec![])).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let twice = images.pull(&registry.name("twice"), None, None).await.unwrap();
    assert_eq!(twice.layers.len(), 2);
    assert!(twice.layers[0].join("a").exists() && twice.layers[1].join("b").exists());
    let none = images.pull(&registry.name("none"), None, None).await.unwrap();
    assert_eq!(none.layers.len(), 1);
    assert!(none.layers[0].is_dir());
    drop(images);
    let images = store(root.path()).await;
    assert_eq!(images.list().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_with_a_missing_layer_is_dropped_and_the_store_is_locked() {
    let registry = TestRegistry::start().await;
    registry.push("app", "latest", &TestImage::small("x")).await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let image = images.pull(&registry.name("app"), None, None).await.unwrap();
    let error = Images::open(ImagesConfig::new(root.path())).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked);
    drop(images);
    std::fs::remove_file(image.layers[0].parent().unwrap().join("complete")).unwrap();
    let images = store(root.path()).await;
    assert!(images.list().is_empty());
    images.pull(&registry.name("app"), None, None).await.unwrap();
    assert!(image.layers[0].join("hello").is_file());
}

#[tokio::test(flavor = "multi_thread")]
async fn implied_directories_keep_the_attributes_of_lower_layers() {
    use std::os::unix::fs::MetadataExt;
    let registry = TestRegistry::start().await;
    let base = TestTar::new()
        .with(b'5', "tmp", "", attributes(0o1777, 0, 0, 7))
        .with(b'5', "home", "", attributes(0o755, 0, 0, 7))
        .with(b'5', "home/u", "", attributes(0o700, 1000, 1000, 7))
        .directory("plain");
    let top = TestTar::new().file("tmp/x", b"").file("home/u/.cache/y", b"").file("plain/z", b"");
    registry.push("implied", "latest", &TestImage::new(vec![layer(base), layer(top)])).await;
    let usual = TestTar::new().directory("plain").file("plain/z", b"");
    registry
        .push(
            "usual",
            "latest",
            &TestImage::new(vec![layer(usual), layer(TestTar::new().file("plain/y", b""))]),
        )
        .await;
    let root = tempfile::tempdir().unwrap();
    let images = store(root.path()).await;
    let image = images.pull(&registry.name("implied"), None, None).await.unwrap();
    assert_eq!(image.layers.len(), 3);
    let stat = |name: &str| std::fs::metadata(image.layers[0].join(name)).unwrap();
    assert_eq!(stat("tmp").mode() & 0o7777, 0o1777);
    assert_eq!((stat("home/u").mode() & 0o7777, stat("home/u").uid(), stat("home").uid()), (0o700, 1000, 0));
    assert!(!image.layers[0].join("home/u/.cache").exists() && !image.layers[0].join("plain").exists());
    assert_eq!(images.pull(&registry.name("usual"), None, None).await.unwrap().layers.len(), 2);
    assert_eq!(images.pull(&registry.name("implied"), None, None).await.unwrap().layers, image.layers);
    images.remove(&image.id).await.unwrap();
    images.remove(&registry.name("usual")).await.unwrap();
    nothing_left(root.path()).await;
}
