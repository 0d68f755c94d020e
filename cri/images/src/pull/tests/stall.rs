//! Registries that accept connections and then stall, in every phase of a pull.

use std::path::Path;
use std::time::Duration;

use tokio::net::TcpListener;

use super::{entries, nothing_left};
use crate::digest::Digest;
use crate::fixture::{ProxyFault, TestImage, TestProxy, TestRegistry, TestTar, layer, random_bytes};
use crate::{ErrorKind, Images, ImagesConfig};

async fn with_short_timeouts(root: &Path, hosts: Option<&Path>) -> Images {
    let config = ImagesConfig {
        stall_timeout: Duration::from_secs(2),
        progress_timeout: Duration::from_secs(5),
        registry_config_dir: hosts.map(Path::to_owned),
        ..ImagesConfig::new(root)
    };
    Images::open(config).await.unwrap()
}

/// The limit allows for the timeouts of two documents and a blob on a busy machine.
const LIMIT: Duration = Duration::from_secs(90);

/// Pulls from a stalled registry. Returns the error.
async fn error_of_stalled_pull(images: &Images, name: &str) -> String {
    let pulled = tokio::time::timeout(LIMIT, images.pull(name, None, None)).await;
    let error = pulled.expect("the pull ends").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.report());
    error.report()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_without_progress_ends_in_every_phase() {
    let registry = TestRegistry::start().await;
    let image = TestImage::new(vec![layer(TestTar::new().file("noise", &random_bytes(6 << 20)))]);
    registry.push("big", "latest", &image).await;
    let (config, blob) = (Digest::of(&image.config).to_string(), Digest::of(&image.layers[0]).to_string());
    let cases: [(&str, ProxyFault, &str); 8] = [
        ("/manifests/", ProxyFault::Stall(0), "sent no data within the timeout"),
        ("/manifests/", ProxyFault::Stall(20), "sent no data within the timeout"),
        ("/manifests/", ProxyFault::Stall(400), "sent no data within the timeout"),
        ("/manifests/", ProxyFault::Drip(0), "no progress in 5s"),
        (&config, ProxyFault::Stall(0), "no progress in 5s"),
        (&blob, ProxyFault::Stall(0), "no progress in 5s"),
        (&blob, ProxyFault::Stall(3000), "no progress in 5s"),
        (&blob, ProxyFault::Drip(20_000), "no progress in 5s"),
    ];
    // The pulls run concurrently, because each pull only waits.
    let all = cases.map(async |(part, fault, expected)| {
        let root = tempfile::tempdir().unwrap();
        let images = with_short_timeouts(root.path(), None).await;
        let (part, what) = (part.to_owned(), fault.clone());
        let line = TestProxy::to(registry.address(), move |head, _| {
            let first = head.lines().next().unwrap();
            if first.starts_with("GET") && first.contains(&part) { fault.clone() } else { ProxyFault::Pass }
        })
        .await;
        let report = error_of_stalled_pull(&images, &line.name("big")).await;
        assert!(report.contains(expected) && report.contains(line.address()), "{what:?}: {report}");
        nothing_left(root.path()).await;
        assert!(entries(&root.path().join("images/resume")) <= 1);
    });
    futures::future::join_all(all).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_token_service_times_out_for_all_waiting_requests() {
    let registry = TestRegistry::start().await;
    let layers = (0..3).map(|n| layer(TestTar::new().file("f", format!("{n}").as_bytes()))).collect();
    registry.push("app", "latest", &TestImage::new(layers)).await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let realm = silent.local_addr().unwrap();
    for path in ["/manifests/", "/blobs/"] {
        let line = TestProxy::to(registry.address(), move |head, _| match head.contains(path) {
            true => ProxyFault::Reply(format!(
                "HTTP/1.1 401 Unauthorized\r\nwww-authenticate: Bearer realm=\"http://{realm}/token\",service=\"s\"\r\n\
                 content-length: 0\r\n\r\n"
            )),
            false => ProxyFault::Pass,
        })
        .await;
        let root = tempfile::tempdir().unwrap();
        let images = with_short_timeouts(root.path(), None).await;
        let report = error_of_stalled_pull(&images, &line.name("app")).await;
        assert!(report.contains(&format!("a token from http://{realm}/token")), "{report}");
        nothing_left(root.path()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_hosts_time_out() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap();
    let hosts = tempfile::tempdir().unwrap();
    std::fs::create_dir(hosts.path().join("r.example")).unwrap();
    for (scheme, expected) in [("http", "sent no data within the timeout"), ("https", "cannot reach")] {
        let text = format!("server = \"{scheme}://{address}\"\ndial_timeout = \"1s\"\n");
        std::fs::write(hosts.path().join("r.example/hosts.toml"), text).unwrap();
        let root = tempfile::tempdir().unwrap();
        let images = with_short_timeouts(root.path(), Some(hosts.path())).await;
        let report = error_of_stalled_pull(&images, "r.example/app").await;
        assert!(report.contains(expected) && report.contains(&address.to_string()), "{report}");
        nothing_left(root.path()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_mirror_is_skipped_and_the_error_lists_every_host() {
    let registry = TestRegistry::start().await;
    let image = TestImage::small("x");
    registry.push("app", "latest", &image).await;
    let not_found = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";
    let absent = TestProxy::to(registry.address(), move |_, _| ProxyFault::Reply(not_found.into())).await;
    let stalling = TestProxy::to(registry.address(), |_, _| ProxyFault::Drip(0)).await;
    let forbidding = TestProxy::to(registry.address(), |_, _| {
        let body = r#"{"errors":[{"code":"DENIED","message":"not yours"}]}"#;
        ProxyFault::Reply(format!("HTTP/1.1 403 Forbidden\r\ncontent-length: {}\r\n\r\n{body}", body.len()))
    })
    .await;
    let hosts = tempfile::tempdir().unwrap();
    let write = |server: &str, mirrors: &[&str]| {
        let directory = hosts.path().join("r.example");
        std::fs::create_dir_all(&directory).unwrap();
        let mirrors: String = mirrors.iter().map(|mirror| format!("[host.\"http://{mirror}\"]\n")).collect();
        std::fs::write(directory.join("hosts.toml"), format!("server = \"http://{server}\"\n{mirrors}"))
            .unwrap();
    };
    let root = tempfile::tempdir().unwrap();
    let images = with_short_timeouts(root.path(), Some(hosts.path())).await;
    write(registry.address(), &[stalling.address(), absent.address()]);
    assert_eq!(images.pull("r.example/app", None, None).await.unwrap().id, image.id());
    images.remove("r.example/app").await.unwrap();
    let reserved = coracle_testing::ClosedPort::reserve();
    let dead = reserved.address().to_string();
    for (server, kind, last) in [
        (dead.as_str(), ErrorKind::Unavailable, "cannot reach"),
        (forbidding.address(), ErrorKind::Unauthorized, "403 Forbidden (DENIED: not yours)"),
        (absent.address(), ErrorKind::NotFound, "404 Not Found"),
    ] {
        write(server, &[absent.address()]);
        let error = images.pull("r.example/app", None, None).await.unwrap_err();
        let report = error.report();
        assert_eq!(error.kind(), kind, "{report}");
        let (first, second) = report.split_once("; last").unwrap();
        assert!(first.contains(absent.address()) && first.contains("404 Not Found"), "{report}");
        assert!(second.contains(server) && second.contains(last), "{report}");
    }
}
