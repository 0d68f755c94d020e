//! A runtime under test with its client.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use coracle_integration::Machine;
use coracle_proto::cri;
use coracle_proto::cri::image_service_client::ImageServiceClient;
use coracle_proto::cri::runtime_service_client::RuntimeServiceClient;
use tokio::task::JoinHandle;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

/// The image of every container.
pub(crate) const IMAGE: &str = "docker.io/library/busybox:latest";

/// `coracle runtime`, perhaps with a point armed.
pub(crate) struct Node {
    process: Child,
    runtime: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
    cgroup_parent: String,
    logs: String,
    log: PathBuf,
    /// What its containers run.
    command: &'static str,
    heard: Arc<Mutex<Heard>>,
    listener: Option<JoinHandle<()>>,
    /// What it said that it made, and that it lists.
    pub(crate) known: BTreeSet<String>,
    /// What it said that it started.
    pub(crate) started: BTreeSet<String>,
}

/// What became of what, in the words of events, in their order.
pub(crate) type Heard = Vec<(String, i32)>;

// === impl Node ===

impl Node {
    /// Starts it, with a log of its own, and waits until it serves.
    pub(crate) async fn start(machine: &Machine, mirrors: &Path, armed: Option<&str>) -> Self {
        let socket = machine.path("cri.sock");
        let words = machine.path("runtime.log");
        let log = std::fs::File::create(&words).unwrap();
        let mut command = Command::new(Machine::coracle());
        command.arg("runtime").arg("--listen").arg(format!("unix://{}", socket.display()));
        command.arg("--root").arg(machine.path("root")).arg("--state").arg(machine.path("run"));
        command.arg("--cgroup-root").arg(format!("/{}", machine.name()));
        command.arg("--registry-config-dir").arg(mirrors);
        command.envs(armed.map(|point| ("CORACLE_FAULT", point)));
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let process = command.spawn().unwrap();
        let channel = until("the runtime serves", || async {
            let endpoint = Endpoint::try_from(format!("unix://{}", socket.display())).unwrap();
            let channel = endpoint.connect().await.ok()?;
            let version = cri::VersionRequest::default();
            RuntimeServiceClient::new(channel.clone()).version(version).await.ok()?;
            Some(channel)
        })
        .await;
        Self {
            heard: Arc::default(),
            listener: None,
            known: BTreeSet::new(),
            started: BTreeSet::new(),
            process,
            runtime: RuntimeServiceClient::new(channel.clone()),
            images: ImageServiceClient::new(channel),
            cgroup_parent: format!("/{}/kubepods/pod-life", machine.name()),
            logs: machine.path("logs").display().to_string(),
            log: words,
            // Only what does not heed its stop signal is killed.
            command: if armed == Some("stop.killed") {
                "trap '' TERM; exec sleep 9999"
            } else {
                "exec sleep 9999"
            },
        }
    }

    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Listens to its events until it ends.
    pub(crate) async fn listen(&mut self) {
        let events = self.runtime.get_container_events(cri::GetEventsRequest {}).await;
        let mut events = events.unwrap().into_inner();
        let heard = Arc::clone(&self.heard);
        self.listener = Some(tokio::spawn(async move {
            while let Ok(Some(event)) = events.message().await {
                heard.lock().unwrap().push((event.container_id, event.container_event_type));
            }
        }));
    }

    /// What it told; all of it when it ended.
    pub(crate) async fn heard(&mut self) -> Heard {
        if self.process.try_wait().unwrap().is_some()
            && let Some(listener) = self.listener.take()
        {
            listener.await.unwrap();
        }
        self.heard.lock().unwrap().clone()
    }

    /// Waits until its listener, if there is one, heard what an answered call did: at the next step nothing is between
    /// the runtime and the listener.
    async fn hear(&self, id: &str, what: i32) {
        let said = |(of, said): &(String, i32)| of == id && *said == what;
        if self.listener.is_some() {
            soon(|| self.heard.lock().unwrap().iter().any(said)).await;
        }
    }

    /// Kills it. Pods go on.
    pub(crate) fn stop(&mut self) {
        self.process.kill().ok();
        self.process.wait().unwrap();
    }

    /// Whether it ended by itself.
    pub(crate) async fn has_crashed(&mut self) -> bool {
        soon(|| self.process.try_wait().unwrap().is_some()).await
    }

    /// Whether it saw the end of a shim that it had not asked to end.
    pub(crate) async fn has_lost_a_shim(&self) -> bool {
        soon(|| std::fs::read_to_string(&self.log).unwrap().contains("the shim died")).await
    }

    /// Everything that a kubelet does with an image, a pod and its container, to their end.
    pub(crate) async fn whole_life(&mut self) -> Result<(), Status> {
        let image = Some(cri::ImageSpec { image: IMAGE.into(), ..Default::default() });
        self.pull().await?;
        let sandbox = self.sandbox();
        let run = cri::RunPodSandboxRequest { config: Some(sandbox.clone()), ..Default::default() };
        let pod_sandbox_id = self.runtime.run_pod_sandbox(run).await?.into_inner().pod_sandbox_id;
        self.known.insert(pod_sandbox_id.clone());
        self.started.insert(pod_sandbox_id.clone());
        self.hear(&pod_sandbox_id, 1).await;
        let create = cri::CreateContainerRequest {
            pod_sandbox_id: pod_sandbox_id.clone(),
            config: Some(container(image.clone(), self.command)),
            sandbox_config: Some(sandbox),
        };
        let container_id = self.runtime.create_container(create).await?.into_inner().container_id;
        let id = || container_id.clone();
        self.known.insert(id());
        self.hear(&container_id, 0).await;
        self.runtime.start_container(cri::StartContainerRequest { container_id: id() }).await?;
        self.started.insert(id());
        self.hear(&container_id, 1).await;
        let cmd = vec!["echo".to_owned(), "alive".to_owned()];
        let exec = cri::ExecSyncRequest { container_id: id(), cmd, timeout: 10 };
        let said = self.runtime.exec_sync(exec).await?.into_inner();
        assert_eq!(said.stdout, b"alive\n");
        self.runtime.stop_container(cri::StopContainerRequest { container_id: id(), timeout: 1 }).await?;
        self.hear(&container_id, 2).await;
        self.runtime.remove_container(cri::RemoveContainerRequest { container_id: id() }).await?;
        self.hear(&container_id, 3).await;
        self.end(&pod_sandbox_id).await?;
        self.hear(&pod_sandbox_id, 3).await;
        self.images.remove_image(cri::RemoveImageRequest { image }).await?;
        Ok(())
    }

    /// Pulls the image.
    pub(crate) async fn pull(&mut self) -> Result<(), Status> {
        let image = Some(cri::ImageSpec { image: IMAGE.into(), ..Default::default() });
        self.images.pull_image(cri::PullImageRequest { image, ..Default::default() }).await?;
        Ok(())
    }

    /// What it lists is what is: a pod that is ready has its processes, a container that runs can be entered,
    /// and nothing half-made is shown.
    pub(crate) async fn is_true(&mut self) -> Result<(), String> {
        let say = |status: Status| status.to_string();
        let sandboxes = self.runtime.list_pod_sandbox(cri::ListPodSandboxRequest::default()).await;
        for sandbox in sandboxes.map_err(say)?.into_inner().items {
            self.known.insert(sandbox.id.clone());
            let status = cri::PodSandboxStatusRequest { pod_sandbox_id: sandbox.id, verbose: false };
            let status = self.runtime.pod_sandbox_status(status).await.map_err(say)?.into_inner();
            let status = status.status.ok_or("a sandbox without a status")?;
            let ready = status.state() == cri::PodSandboxState::SandboxReady;
            let addressed = status.network.is_some_and(|network| !network.ip.is_empty());
            if ready && !addressed {
                return Err("a ready sandbox has no address".into());
            }
        }
        let containers = self.runtime.list_containers(cri::ListContainersRequest::default()).await;
        for container in containers.map_err(say)?.into_inner().containers {
            self.known.insert(container.id.clone());
            if container.state() != cri::ContainerState::ContainerRunning {
                continue;
            }
            let cmd = vec!["true".to_owned()];
            let exec = cri::ExecSyncRequest { container_id: container.id, cmd, timeout: 10 };
            let code = self.runtime.exec_sync(exec).await.map_err(say)?.into_inner().exit_code;
            if code != 0 {
                return Err(format!("a running container answers {code}"));
            }
        }
        Ok(())
    }

    /// Removes all that is listed.
    pub(crate) async fn remove_all(&mut self) -> Result<(), Status> {
        let sandboxes = self.runtime.list_pod_sandbox(cri::ListPodSandboxRequest::default()).await?;
        for sandbox in sandboxes.into_inner().items {
            self.end(&sandbox.id).await?;
        }
        let containers = self.runtime.list_containers(cri::ListContainersRequest::default()).await?;
        assert_eq!(containers.into_inner().containers, [], "containers without a pod");
        let image = Some(cri::ImageSpec { image: IMAGE.into(), ..Default::default() });
        self.images.remove_image(cri::RemoveImageRequest { image }).await?;
        Ok(())
    }

    async fn end(&mut self, id: &str) -> Result<(), Status> {
        let pod_sandbox_id = id.to_owned();
        let stop = cri::StopPodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() };
        self.runtime.stop_pod_sandbox(stop).await?;
        // Not of one that stopped in an earlier life.
        if self.heard.lock().unwrap().contains(&(pod_sandbox_id.clone(), 1)) {
            self.hear(&pod_sandbox_id, 2).await;
        }
        self.runtime.remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id }).await?;
        Ok(())
    }

    fn sandbox(&self) -> cri::PodSandboxConfig {
        let metadata = cri::PodSandboxMetadata {
            name: "life".into(),
            uid: "uid-life".into(),
            namespace: "default".into(),
            attempt: 0,
        };
        let mapping = cri::PortMapping { container_port: 80, host_port: 8080, ..Default::default() };
        cri::PodSandboxConfig {
            metadata: Some(metadata),
            log_directory: self.logs.clone(),
            port_mappings: vec![mapping],
            linux: Some(cri::LinuxPodSandboxConfig {
                cgroup_parent: self.cgroup_parent.clone(),
                ..Default::default()
            }),
            ..Default::default()
        }
    }
}

/// Whether all that was known, and is gone, was told from its beginning to its end, each transition once and in order.
pub(crate) fn told_once(
    heard: &Heard,
    known: &BTreeSet<String>,
    started: &BTreeSet<String>,
) -> Result<(), String> {
    let mut lives: BTreeMap<&str, Vec<i32>> = known.iter().map(|id| (id.as_str(), Vec::new())).collect();
    heard.iter().for_each(|(id, what)| lives.entry(id).or_default().push(*what));
    // Created, started, stopped, deleted: 0 to 3.
    for (id, life) in lives {
        let whole = if started.contains(id) {
            life == [0, 1, 2, 3]
        } else {
            life == [0, 1, 2, 3] || life == [0, 2, 3]
        };
        if !whole {
            return Err(format!("{id} was told as {life:?}"));
        }
    }
    Ok(())
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop();
    }
}

fn container(image: Option<cri::ImageSpec>, command: &str) -> cri::ContainerConfig {
    cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: "c".into(), attempt: 0 }),
        image,
        command: ["sh", "-c", command].map(str::to_owned).to_vec(),
        log_path: "c.log".into(),
        ..Default::default()
    }
}

/// Whether something comes true within a moment.
async fn soon(mut come: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(20) {
        if come() {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    false
}

/// Waits until there is an answer.
async fn until<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(began.elapsed() < Duration::from_secs(20), "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
