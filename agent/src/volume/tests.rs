//! Volumes of a pod, in a mount namespace of the test, with a small API that the test changes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;

use base64::Engine;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD};
use bytes::Bytes;
use coracle_testing::until;
use futures::StreamExt;
use http::{Request, Response};
use http_body_util::StreamBody;
use hyper::body::Frame;
use nix::mount::{MsFlags, mount as kernel_mount};
use nix::sched::{CloneFlags, unshare};
use serde_json::{Value, json};
use tokio::sync::broadcast;
use tokio_stream::wrappers::BroadcastStream;

use super::*;
use crate::api_health::ApiHealth;
use crate::checkpoint::Checkpoint;
use crate::kubelet_metrics::{Current, KubeletMetrics};

type Frames = futures::stream::BoxStream<'static, Result<Frame<Bytes>, std::convert::Infallible>>;

/// The API's objects by path, and their watchers.
#[derive(Clone)]
struct Api {
    objects: Arc<Mutex<BTreeMap<String, Value>>>,
    events: broadcast::Sender<(String, Value)>,
    tokens: Arc<std::sync::atomic::AtomicU64>,
    /// Lifetime of issued tokens in seconds.
    lifetime: Arc<std::sync::atomic::AtomicI64>,
    /// Whether every request is refused, as by a server that is starting.
    is_down: Arc<std::sync::atomic::AtomicBool>,
    /// The recorded events (core/v1), in the order of their requests.
    recorded: Arc<Mutex<Vec<Value>>>,
}

impl Api {
    fn new() -> Api {
        Api {
            objects: Arc::default(),
            events: broadcast::channel(16).0,
            tokens: Arc::default(),
            lifetime: Arc::new(3600.into()),
            is_down: Arc::default(),
            recorded: Arc::default(),
        }
    }

    fn put(&self, resource: &str, name: &str, body: Value) {
        let kind = if resource == "secrets" { "Secret" } else { "ConfigMap" };
        let mut object = json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": "ns", "resourceVersion": "2"}});
        body.as_object().expect("fields").iter().for_each(|(key, value)| object[key] = value.clone());
        let path = format!("/api/v1/namespaces/ns/{resource}/{name}");
        let is_new = lock(&self.objects).insert(path.clone(), object.clone()).is_none();
        let _ = self
            .events
            .send((path, json!({"type": if is_new { "ADDED" } else { "MODIFIED" }, "object": object})));
    }

    fn client(&self) -> kube::Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let api = api.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect_bytes().await.expect("body");
                Ok::<_, std::convert::Infallible>(api.answer(&Request::from_parts(head, body)))
            }
        });
        kube::Client::new(service, "ns")
    }

    fn answer(&self, request: &Request<Bytes>) -> Response<StreamBody<Frames>> {
        let (path, query) = (request.uri().path().to_owned(), request.uri().query().unwrap_or_default());
        let one =
            |value: Value| futures::stream::iter([Ok(Frame::data(Bytes::from(value.to_string())))]).boxed();
        let selected = query
            .split("fieldSelector=metadata.name%3D")
            .nth(1)
            .map(|rest| format!("{path}/{}", rest.split('&').next().unwrap_or_default()));
        let (status, body) = match selected {
            _ if self.is_down.load(std::sync::atomic::Ordering::SeqCst) => {
                (503, one(json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 503})))
            }
            _ if path.ends_with("/events") => {
                let event: Value = serde_json::from_slice(request.body()).expect("an event");
                lock(&self.recorded).push(event.clone());
                (201, one(event))
            }
            _ if path.ends_with("/token") => (201, one(self.token())),
            Some(of) if query.contains("watch=") => {
                let events = BroadcastStream::new(self.events.subscribe());
                let lines = events.filter_map(move |event| {
                    let line = event
                        .ok()
                        .filter(|(path, _)| *path == of)
                        .map(|(_, event)| Ok(Frame::data(Bytes::from(format!("{event}\n")))));
                    async move { line }
                });
                (200, lines.boxed())
            }
            Some(of) => {
                let items: Vec<Value> = lock(&self.objects).get(&of).cloned().into_iter().collect();
                (
                    200,
                    one(
                        json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}),
                    ),
                )
            }
            None => match lock(&self.objects).get(&path) {
                Some(object) => (200, one(object.clone())),
                None => (
                    404,
                    one(
                        json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404, "message": "not found"}),
                    ),
                ),
            },
        };
        let mut response = Response::new(StreamBody::new(body));
        *response.status_mut() = http::StatusCode::from_u16(status).expect("status");
        response
    }

    fn token(&self) -> Value {
        let number = self.tokens.fetch_add(1, std::sync::atomic::Ordering::SeqCst) + 1;
        let now = jiff::Timestamp::now();
        let lifetime = self.lifetime.load(std::sync::atomic::Ordering::SeqCst);
        let claims = BASE64_URL_SAFE_NO_PAD.encode(
            json!({"iat": now.as_second() - 3600 + lifetime, "exp": now.as_second() + lifetime}).to_string(),
        );
        let ends = now.checked_add(jiff::SignedDuration::from_secs(lifetime)).expect("time");
        json!({"kind": "TokenRequest", "apiVersion": "authentication.k8s.io/v1", "spec": {"audiences": []},
            "status": {"token": format!("head.{claims}.{number}"), "expirationTimestamp": ends.to_string()}})
    }
}

/// A node's directories. The directories end with the test and its mount namespace.
struct Machine {
    dir: PathBuf,
    api: Api,
}

impl Machine {
    fn new(name: &str) -> Machine {
        let dir = std::env::temp_dir().join(format!("coracle-volumes-{}-{name}", std::process::id()));
        fs::create_dir_all(&dir).expect("temp dir");
        Machine { dir, api: Api::new() }
    }

    fn context(&self) -> VolumeContext {
        let config = VolumeConfig {
            pods_dir: self.dir.join("pods"),
            memory_dir: self.dir.join("run/volumes"),
            local_dir: self.dir.join("local"),
            eviction: EvictionThresholds::NONE,
        };
        let client = self.api.client();
        let checkpoint =
            Checkpoint::open(&self.dir.join("agent"), &self.dir.join("sealing.key")).expect("checkpoint");
        let configs = ConfigCache::new(client.clone(), checkpoint, ApiHealth::default());
        let (recorder, events) = crate::event_recorder::channel(client, "n1");
        tokio::spawn(events.run());
        let node = MachineProperties {
            name: "n1".to_owned(),
            ips: Vec::new(),
            capacity: BTreeMap::new(),
            allocatable: BTreeMap::new(),
            memory_of_pods: 0,
            local_volume_kib: None,
            info: k8s_openapi::api::core::v1::NodeSystemInfo::default(),
        };
        VolumeContext::open(config, configs, recorder, Arc::new(node)).expect("root, to mount")
    }

    fn mounts(&self) -> Vec<String> {
        let table = fs::read_to_string("/proc/thread-self/mountinfo").expect("mountinfo");
        let dir = self.dir.to_string_lossy().into_owned();
        table
            .lines()
            .filter_map(|line| line.split(' ').nth(4))
            .filter_map(|at| at.strip_prefix(&dir).map(str::to_owned))
            .collect()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = mounts::remove_tree(&self.dir);
    }
}

/// Runs a test in a private mount namespace. Needs root.
fn apart(test: impl Future<Output = ()> + Send + 'static) {
    apart_on(tokio::runtime::Builder::new_current_thread(), test);
}

/// Like [`apart`], on this runtime.
fn apart_on(mut runtime: tokio::runtime::Builder, test: impl Future<Output = ()> + Send + 'static) {
    let thread = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNS).expect("unshare needs root");
        coracle_threads::declare_own_namespaces();
        let none: Option<&str> = None;
        kernel_mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("private mounts");
        runtime.enable_all().build().expect("runtime").block_on(test);
    });
    thread.join().expect("the test");
}

fn pod(volumes: Value) -> Pod {
    let spec = json!({"serviceAccountName": "default", "containers": [{"name": "a"}], "volumes": volumes});
    serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u1", "labels": {"app": "x"}}, "spec": spec})).expect("pod")
}

fn content(volumes: &Volumes, volume: &str, file: &str) -> Option<String> {
    fs::read_to_string(volumes.host_path(volume).expect("a volume").join(file)).ok()
}

#[test]
fn mounts_are_measured_by_plugin() {
    apart(async {
        let machine = Machine::new("measured");
        machine.api.put("configmaps", "c", json!({"data": {"key": "one"}}));
        let ctx = machine.context();
        let volumes = json!([{"name": "disk", "emptyDir": {}}, {"name": "map", "configMap": {"name": "c"}}]);
        mount_all(&ctx, &pod(volumes)).await.expect("mounted");
        let metrics = KubeletMetrics::default();
        metrics.show(ctx.operations().collector());
        let text = metrics.text(&Current::default());
        for plugin in ["empty-dir", "configmap"] {
            let fixed = "migrated=\"false\",operation_name=\"volume_mount\",status=\"success\"";
            let labels = format!("{fixed},volume_plugin=\"kubernetes.io/{plugin}\"");
            let line = format!("storage_operation_duration_seconds_count{{{labels}}} 1");
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
        unmount_all(&ctx, "u1").await.expect("removed");
    });
}

#[test]
fn a_pods_volumes_are_made_refreshed_and_removed() {
    apart(async {
        let machine = Machine::new("story");
        machine.api.put("configmaps", "c", json!({"data": {"key": "one"}}));
        machine.api.put("secrets", "s", json!({"data": {"password": BASE64_STANDARD.encode("secret")}}));
        let ctx = machine.context();
        let before = machine.mounts();
        assert_eq!(before, ["/pods", "/run/volumes"]);
        let pod = pod(json!([
            {"name": "disk", "emptyDir": {}},
            {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            {"name": "map", "configMap": {"name": "c"}},
            {"name": "secret", "secret": {"secretName": "s", "defaultMode": 0o400}},
            {"name": "access", "projected": {"sources": [
                {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}},
                {"configMap": {"name": "c", "items": [{"key": "key", "path": "ca.crt"}]}},
                {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}}]}},
        ]));
        let volumes = mount_all(&ctx, &pod).await.expect("mounted");
        let at = |volume: &str| volumes.host_path(volume).expect("a volume");
        assert_eq!(fs::metadata(at("disk")).expect("disk").mode() & 0o777, 0o777);
        assert!(
            mounts::is_tmpfs(at("memory")).expect("memory")
                && mounts::is_tmpfs(at("secret")).expect("secret")
        );
        assert_eq!(content(&volumes, "secret", "password").as_deref(), Some("secret"));
        assert_eq!(fs::metadata(at("secret").join("password")).expect("file").mode() & 0o777, 0o400);
        assert_eq!(content(&volumes, "access", "namespace").as_deref(), Some("ns"));
        assert_eq!(content(&volumes, "access", "ca.crt").as_deref(), Some("one"));
        assert!(volumes.read_only("secret") && !volumes.read_only("disk"));
        let kubelets = machine.dir.join("pods/u1/volumes/kubernetes.io~projected/access/namespace");
        assert_eq!(fs::read_to_string(kubelets).ok().as_deref(), Some("ns"));

        machine.api.put("configmaps", "c", json!({"data": {"key": "two"}}));
        until("the files are refreshed", 10, || {
            let has_new = |volume, name| content(&volumes, volume, name).as_deref() == Some("two");
            has_new("map", "key") && has_new("access", "ca.crt")
        })
        .await;
        assert_eq!(
            content(&volumes, "access", "token").expect("token").rsplit('.').next(),
            Some("1"),
            "requested once"
        );

        assert_eq!(ctx.pods(), BTreeSet::from(["u1".to_owned()]));
        unmount_all(&ctx, "u1").await.expect("removed");
        unmount_all(&ctx, "u1").await.expect("removed the absent");
        assert_eq!(machine.mounts(), before);
        assert!(ctx.pods().is_empty());
    });
}

#[test]
fn volumes_are_removed_while_no_blocking_thread_of_the_runtime_is_free() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.max_blocking_threads(1);
    apart_on(runtime, async {
        let machine = Machine::new("busy");
        let ctx = machine.context();
        mount_all(&ctx, &pod(json!([{"name": "disk", "emptyDir": {}}]))).await.expect("mounted");
        let (release, released) = std::sync::mpsc::channel::<()>();
        let blocks = tokio::task::spawn_blocking(move || released.recv().is_ok());
        let removal = tokio::time::timeout(std::time::Duration::from_secs(60), unmount_all(&ctx, "u1"));
        removal.await.expect("it waits for no other work").expect("removed");
        assert!(ctx.pods().is_empty());
        drop(release);
        assert!(!blocks.await.expect("the thread"));
    });
}

#[test]
fn a_sub_path_is_mounted_for_its_container_and_removed_with_the_pod() {
    apart(async {
        let machine = Machine::new("part");
        let ctx = machine.context();
        let before = machine.mounts();
        let volumes =
            mount_all(&ctx, &pod(json!([{"name": "disk", "emptyDir": {}}]))).await.expect("mounted");
        let disk = volumes.host_path("disk").expect("a volume");
        fs::create_dir(disk.join("part")).expect("mkdir");
        fs::write(disk.join("part/file"), "x").expect("write");
        let part = sub_path::SubPath {
            uid: "u1",
            volume: "disk",
            host_path: disk,
            container: "a",
            index: 0,
            path: "part",
            missing: volumes.missing_part("disk"),
            is_bidirectional: false,
        };
        let mounted = sub_path::mount(&ctx, &part).await.expect("sub path");
        assert_eq!(fs::read_to_string(mounted.join("file")).ok().as_deref(), Some("x"));
        assert_eq!(sub_path::mount(&ctx, &part).await.expect("again"), mounted);
        assert_eq!(machine.mounts().len(), before.len() + 1);
        unmount_all(&ctx, "u1").await.expect("removed");
        assert_eq!(machine.mounts(), before);
    });
}

#[test]
fn mounts_in_a_directory_of_the_host_outlive_a_part_of_it() {
    apart(async {
        let machine = Machine::new("host-mounts");
        let ctx = machine.context();
        let disk = machine.dir.join("disk");
        let none: Option<&str> = None;
        let tmpfs = |at: &Path| {
            fs::create_dir_all(at).expect("mount point");
            kernel_mount(Some("tmpfs"), at, Some("tmpfs"), MsFlags::empty(), none).expect("mount");
        };
        tmpfs(&disk);
        // The mount is shared, as on a host with systemd.
        kernel_mount(none, &disk, none, MsFlags::MS_SHARED, none).expect("shared");
        tmpfs(&disk.join("part/early"));
        for (index, is_bidirectional) in [false, true].into_iter().enumerate() {
            let part = sub_path::SubPath {
                uid: "u1",
                volume: "host",
                host_path: &disk,
                container: "a",
                index,
                path: "part",
                missing: sub_path::MissingPart::NewDirectory,
                is_bidirectional,
            };
            let mounted = sub_path::mount(&ctx, &part).await.expect("sub path");
            assert!(mounts::is_mount_point(&mounted.join("early")).expect("mounts"));
            tmpfs(&disk.join(format!("part/later-{index}")));
            assert!(mounts::is_mount_point(&mounted.join(format!("later-{index}"))).expect("mounts"));
            sub_path::mount(&ctx, &part).await.expect("the container starts again");
            unmount_all(&ctx, "u1").await.expect("removed");
        }
        for kept in ["part/early", "part/later-0", "part/later-1"] {
            assert!(mounts::is_mount_point(&disk.join(kept)).expect("mounts"), "{kept}");
        }
    });
}

#[test]
fn a_missing_part_of_a_volume_that_the_node_writes_takes_no_shared_memory() {
    apart(async {
        let machine = Machine::new("missing-part");
        let ctx = machine.context();
        let volumes = json!([{"name": "info", "downwardAPI": {"items": [
            {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}}]);
        let volumes = mount_all(&ctx, &pod(volumes)).await.expect("mounted");
        let root = volumes.host_path("info").expect("a volume");
        let count = || fs::read_dir(root).expect("volume").count();
        let (before, deep) = (count(), ["d"; 1000].join("/"));
        let mut part = sub_path::SubPath {
            uid: "u1",
            volume: "info",
            host_path: root,
            container: "a",
            index: 0,
            path: &deep,
            missing: volumes.missing_part("info"),
            is_bidirectional: false,
        };
        let empty = sub_path::mount(&ctx, &part).await.expect("an empty directory");
        assert_eq!((fs::read_dir(&empty).expect("directory").count(), count()), (0, before));
        // The next start of the container finds the file.
        part.path = "name";
        assert_eq!(sub_path::mount(&ctx, &part).await.expect("a file"), empty);
        assert!(empty.is_file());
        part.path = "gone";
        assert!(sub_path::mount(&ctx, &part).await.expect("a directory").is_dir());
        part.path = "../other";
        assert!(sub_path::mount(&ctx, &part).await.is_err());
        // A volume that the pod uses read-only.
        (part.path, part.missing) = ("new", sub_path::MissingPart::Nothing);
        let refused = sub_path::mount(&ctx, &part).await.expect_err("it does not exist");
        assert!(matches!(refused, sub_path::SubPathError::Missing(_)), "{refused}");
        assert_eq!(count(), before);
        unmount_all(&ctx, "u1").await.expect("removed");
    });
}

#[test]
fn the_next_agent_adopts_or_removes_the_volumes_of_a_crashed_agent() {
    apart(async {
        let machine = Machine::new("restart");
        let pod = pod(json!([
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
            {"name": "access", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}]));
        let first = mount_all(&machine.context(), &pod).await.expect("mounted");
        fs::write(first.host_path("memory").expect("volume").join("kept"), "x").expect("write");
        let mounts = machine.mounts();
        let ctx = machine.context();
        let again = mount_all(&ctx, &pod).await.expect("adopted");
        assert_eq!(content(&again, "memory", "kept").as_deref(), Some("x"));
        assert_eq!(
            content(&again, "access", "token").expect("token").rsplit('.').next(),
            Some("1"),
            "the token is still valid"
        );
        assert_eq!(machine.mounts(), mounts);
        let third = machine.context();
        unmount_all(&third, "u1").await.expect("removed by an agent that has not mounted it");
        assert_eq!(machine.mounts(), ["/pods", "/run/volumes"]);
        close(&VolumeConfig {
            pods_dir: machine.dir.join("pods"),
            memory_dir: machine.dir.join("run/volumes"),
            local_dir: "/nonexistent".into(),
            eviction: EvictionThresholds::NONE,
        })
        .expect("closed");
        assert_eq!(machine.mounts(), Vec::<String>::new());
    });
}

#[test]
fn a_volume_in_memory_has_its_mode_and_group_again_after_a_boot() {
    apart(async {
        let machine = Machine::new("boot");
        let mut pod = pod(json!([{"name": "memory", "emptyDir": {"medium": "Memory"}}]));
        let context = json!({"fsGroup": 1234});
        pod.spec.as_mut().expect("spec").security_context = serde_json::from_value(context).expect("context");
        let ctx = machine.context();
        for _boot in 0..2 {
            let volumes = mount_all(&ctx, &pod).await.expect("mounted");
            let path = volumes.host_path("memory").expect("volume");
            let found = fs::metadata(path).expect("memory");
            assert_eq!((found.mode() & 0o7777, found.gid()), (0o3777, 1234));
            mounts::unmount_below(path).expect("unmount everything, as a boot does");
        }
        unmount_all(&ctx, "u1").await.expect("removed");
        close(&machine.context().shared.config).expect("closed");
    });
}

#[test]
fn an_older_version_of_a_pod_is_not_kept_in_memory() {
    apart(async {
        let machine = Machine::new("versions");
        machine.api.put("configmaps", "c", json!({"data": {"key": "one"}}));
        let ctx = machine.context();
        let old = std::sync::Arc::new(pod(json!([{"name": "v", "configMap": {"name": "c"}}])));
        mount_all(&ctx, &old).await.expect("mounted");
        follow(&ctx, &old);
        let mut new = (*old).clone();
        new.status = Some(k8s_openapi::api::core::v1::PodStatus::default());
        follow(&ctx, &std::sync::Arc::new(new));
        until("the older version is dropped", 10, || std::sync::Arc::strong_count(&old) == 1).await;
        unmount_all(&ctx, "u1").await.expect("removed");
    });
}

#[test]
fn files_of_a_new_pod_are_written_once() {
    apart(async {
        let machine = Machine::new("once");
        machine.api.put("configmaps", "c", json!({"data": {"key": "one"}}));
        let ctx = machine.context();
        let mut second = pod(json!([{"name": "v", "configMap": {"name": "c"}}]));
        mount_all(&ctx, &second).await.expect("mounted");
        // The first answer about a known object is not a change for this pod.
        second.metadata.uid = Some("u2".to_owned());
        let volumes = mount_all(&ctx, &second).await.expect("mounted");
        let file = volumes.host_path("v").expect("a volume").join("key");
        fs::write(&file, "marked").expect("a mark");
        for _ in 0..1000 {
            tokio::task::yield_now().await;
        }
        assert_eq!(content(&volumes, "v", "key").as_deref(), Some("marked"));
        for uid in ["u1", "u2"] {
            unmount_all(&ctx, uid).await.expect("removed");
        }
    });
}

#[test]
fn the_error_of_a_volume_that_cannot_be_mounted_is_that_of_the_kubelet() {
    apart(async {
        let machine = Machine::new("failures");
        let ctx = machine.context();
        let failure = async |volume: Value| {
            mount_all(&ctx, &pod(json!([volume]))).await.expect_err("no volume").event().1
        };
        let absent = failure(json!({"name": "x", "configMap": {"name": "y"}})).await;
        assert_eq!(absent, "MountVolume.SetUp failed for volume \"x\" : configmap \"y\" not found");
        let kind = failure(json!({"name": "x", "iscsi": {"targetPortal": "t", "iqn": "i", "lun": 0}})).await;
        assert!(kind.contains("iscsi is not supported"), "{kind}");
        let name = failure(json!({"name": "../x", "emptyDir": {}})).await;
        assert!(name.contains("not allowed"), "{name}");
        mount_all(&ctx, &pod(json!([{"name": "x", "configMap": {"name": "y", "optional": true}}])))
            .await
            .expect("optional");
        assert!(unmount_all(&ctx, "../u1").await.is_err());
        unmount_all(&ctx, "u1").await.expect("removed");
    });
}

#[test]
fn after_a_boot_an_expired_token_is_used_with_one_warning_until_the_api_server_responds() {
    apart(async {
        let machine = Machine::new("alone");
        let set = |down: bool, lifetime: i64| {
            machine.api.is_down.store(down, std::sync::atomic::Ordering::SeqCst);
            machine.api.lifetime.store(lifetime, std::sync::atomic::Ordering::SeqCst);
        };
        machine.api.put("configmaps", "c", json!({"data": {"key": "one"}}));
        let pod = pod(json!([{"name": "access", "projected": {"sources": [
            {"serviceAccountToken": {"path": "token"}}, {"configMap": {"name": "c"}}]}}]));
        let open = |machine: &Machine| {
            let ctx = machine.context();
            ctx.shared.tokens.checkpoint().own("u1", crate::checkpoint::references(&pod));
            ctx
        };
        set(false, -10);
        let first = open(&machine);
        let volumes = mount_all(&first, &pod).await.expect("mounted");
        let token = content(&volumes, "access", "token").expect("token");
        assert!(!first.shared.tokens.checkpoint().flush());
        drop(first);
        fs::remove_dir_all(machine.dir.join("run/volumes/u1")).expect("run directory");
        set(true, 3600);
        let second = open(&machine);
        let volumes = mount_all(&second, &pod).await.expect("mounted without the API server");
        assert_eq!(content(&volumes, "access", "token").as_ref(), Some(&token));
        assert_eq!(content(&volumes, "access", "key").as_deref(), Some("one"));
        mount_all(&second, &pod).await.expect("mounted again without the API server");
        set(false, 3600);
        // Events are sent in their order, so no other event of the token comes after this one.
        second.shared.recorder.pod(&pod, crate::event_recorder::Level::Normal, "Last", "the test ends");
        let of = |reason: &str| -> Vec<Value> {
            lock(&machine.api.recorded).iter().filter(|event| event["reason"] == reason).cloned().collect()
        };
        until("the last event", 10, || !of("Last").is_empty()).await;
        let expired = of("ExpiredServiceAccountToken");
        assert_eq!(expired.len(), 1, "{expired:?}");
        assert_eq!(
            (&expired[0]["type"], &expired[0]["involvedObject"]["name"]),
            (&json!("Warning"), &json!("p"))
        );
        unmount_all(&second, "u1").await.expect("removed");
    });
}

#[test]
fn a_token_is_renewed_although_other_files_of_its_volume_are_above_the_limit() {
    apart(async {
        let machine = Machine::new("renewed");
        let set_lifetime = |seconds| machine.api.lifetime.store(seconds, std::sync::atomic::Ordering::SeqCst);
        machine.api.put("configmaps", "c", json!({"data": {"key": "one"}}));
        let mut pod = pod(json!([{"name": "access", "projected": {"sources": [
            {"serviceAccountToken": {"path": "deep/token"}}, {"configMap": {"name": "c"}}]}}]));
        pod.spec.as_mut().expect("spec").security_context =
            serde_json::from_value(json!({"fsGroup": 7})).expect("a security context");
        let ctx = machine.context();
        set_lifetime(-10);
        let volumes = mount_all(&ctx, &pod).await.expect("mounted");
        let token = || content(&volumes, "access", "deep/token").expect("token");
        let rights = || {
            let found = fs::metadata(volumes.host_path("access").expect("a volume").join("deep/token"));
            found.map(|found| (found.mode() & 0o7777, found.uid(), found.gid())).expect("token")
        };
        let (first, rights_before) = (token(), rights());
        set_lifetime(3600);
        // Each file takes a page.
        let data: BTreeMap<String, &str> = (0..17_000).map(|at| (format!("k{at}"), "")).collect();
        machine.api.put("configmaps", "c", json!({"data": data}));
        until("the token is renewed", 20, || token() != first).await;
        assert_eq!(rights(), rights_before);
        assert_eq!(content(&volumes, "access", "key").as_deref(), Some("one"), "the other files stay");
        let refusals = || -> Vec<Value> {
            let recorded = lock(&machine.api.recorded);
            recorded.iter().filter(|event| event["reason"] == "FailedMount").cloned().collect()
        };
        until("an event", 10, || !refusals().is_empty()).await;
        let message = refusals()[0]["message"].as_str().expect("text").to_owned();
        assert!(message.contains("\"access\"") && message.contains("64 MiB"), "{message}");
        unmount_all(&ctx, "u1").await.expect("removed");
    });
}

#[test]
fn a_checkpoint_on_a_full_disk_keeps_its_records_and_writes_the_rest_later() {
    apart(async {
        let machine = Machine::new("full");
        let dir = machine.dir.join("small");
        fs::create_dir(&dir).expect("mkdir");
        kernel_mount(Some("small"), &dir, Some("tmpfs"), MsFlags::empty(), Some("size=256k")).expect("tmpfs");
        let open = || Checkpoint::open(&dir.join("agent"), &dir.join("sealing.key")).expect("checkpoint");
        let key = |name: &str| crate::checkpoint::Key::pod(name);
        let checkpoint = open();
        checkpoint.put(key("a"), &"old");
        assert!(!checkpoint.flush());
        fs::write(dir.join("ballast"), vec![1; 200 << 10]).expect("ballast");
        checkpoint.put(key("a"), &"x".repeat(100 << 10));
        checkpoint.put(key("b"), &"y".repeat(100 << 10));
        assert!(checkpoint.flush(), "the disk is full");
        assert_eq!(open().get::<String>(&key("a")).as_deref(), Some("old"), "the old record is complete");
        fs::remove_file(dir.join("ballast")).expect("room");
        assert!(!checkpoint.flush());
        assert_eq!(open().get::<String>(&key("a")).map(|text| text.len()), Some(100 << 10));
        assert_eq!(open().get::<String>(&key("b")).map(|text| text.len()), Some(100 << 10));
    });
}

#[test]
fn files_that_stay_after_a_failed_refresh_count_for_the_pod() {
    apart(async {
        let machine = Machine::new("left");
        machine.api.put(
            "secrets",
            "large",
            json!({"data": {"key": BASE64_STANDARD.encode(vec![b'x'; 1 << 20])}}),
        );
        machine.api.put("secrets", "empty", json!({"data": {"key": ""}}));
        let ctx = machine.context();
        let items: Vec<Value> = (0..40).map(|at| json!({"key": "key", "path": format!("f{at}")})).collect();
        let volume = |name: &str, secret: &str| json!({"name": name, "secret": {"secretName": secret, "items": items}});
        let first = pod(json!([volume("a", "empty"), volume("b", "large")]));
        let volumes = mount_all(&ctx, &first).await.expect("40 MiB");

        // The volume b keeps its files, because its secret is missing.
        let second = pod(json!([volume("a", "large"), volume("b", "missing")]));
        let error = mount_all(&ctx, &second).await.expect_err("80 MiB").to_string();
        assert!(error.contains("take more than 64 MiB in this pod"), "{error}");
        let size = |volume: &str| {
            fs::metadata(volumes.host_path(volume).expect("a volume").join("f0")).expect("a file").len()
        };
        assert_eq!((size("a"), size("b")), (0, 1 << 20));
        unmount_all(&ctx, "u1").await.expect("removed");
    });
}

#[test]
fn the_files_of_a_volume_are_copied_after_all_waits() {
    apart(async {
        let machine = Machine::new("copies");
        machine.api.put("secrets", "s", json!({"data": {"key": ""}}));
        let ctx = machine.context();
        let pod = pod(json!([{"name": "v", "projected": {"sources": [
            {"secret": {"name": "s", "items": [{"key": "other", "path": "f"}]}},
            {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}}]}}]));
        let error = mount_all(&ctx, &pod).await.expect_err("the key does not exist").to_string();
        assert!(error.contains("non-existent secret key: other"), "{error}");
        let requested = machine.api.tokens.load(std::sync::atomic::Ordering::SeqCst);
        assert_eq!(requested, 1, "the missing key is found while the files are copied, after the request");
        unmount_all(&ctx, "u1").await.expect("removed");
    });
}

#[test]
fn large_volumes_are_written_one_after_the_other() {
    apart(async {
        let machine = Machine::new("large");
        machine.api.put("secrets", "s", json!({"data": {"key": ""}}));
        let ctx = machine.context();
        let items: Vec<Value> = (0..300).map(|at| json!({"key": "key", "path": format!("f{at}")})).collect();
        let large = pod(json!([{"name": "large", "secret": {"secretName": "s", "items": items}}]));
        let small = pod(json!([{"name": "small", "secret": {"secretName": "s"}}]));
        mount_all(&ctx, &large).await.expect("the secret is known");

        let other = refresh::LARGE_WRITES.take("other").await;
        let mut again = Box::pin(mount_all(&ctx, &large));
        assert!(futures::poll!(&mut again).is_pending(), "another large volume is being written");
        mount_all(&ctx, &small).await.expect("a small volume does not wait");
        drop(other);
        again.await.expect("written");
        unmount_all(&ctx, "u1").await.expect("removed");
    });
}
