//! A runtime under test and its CRI client.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};

use coracle_integration::{Machine, eventually_async, within_async};
use coracle_proto::cri;
use coracle_proto::cri::image_service_client::ImageServiceClient;
use coracle_proto::cri::runtime_service_client::RuntimeServiceClient;
use tokio::task::JoinHandle;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

/// Image of every container.
pub(crate) const IMAGE: &str = "docker.io/library/busybox:latest";

/// `coracle runtime`, optionally with an armed fault point, and a client that records its responses.
pub(crate) struct Node {
    process: Child,
    runtime: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
    cgroup_parent: String,
    logs: String,
    log: PathBuf,
    /// Command of its containers.
    command: &'static str,
    /// Whether pods are stopped without stopping their containers first.
    stops_whole: bool,
    /// Command of execs.
    exec: &'static str,
    received: Arc<Mutex<Received>>,
    listener: Option<JoinHandle<()>>,
    /// Ids that the runtime returned for created objects.
    pub(crate) known: BTreeSet<String>,
    /// Ids whose start succeeded.
    pub(crate) started: BTreeSet<String>,
}

/// A command that outlives the runtime unless the next runtime kills it.
const LEFT_BEHIND: &str = "sleep 9998";

/// Received events in order: id and type.
pub(crate) type Received = Vec<(String, i32)>;

// === impl Node ===

impl Node {
    /// Starts the runtime and waits until it responds.
    pub(crate) async fn start(machine: &Machine, mirrors: &Path, armed: Option<&str>) -> Self {
        Self::try_start(machine, mirrors, armed).await.expect("the runtime ended before it responded")
    }

    /// Like [`start`](Self::start). None if the runtime exits before it responds.
    pub(crate) async fn try_start(machine: &Machine, mirrors: &Path, armed: Option<&str>) -> Option<Self> {
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
        let mut process = command.spawn().unwrap();
        let channel = eventually_async("the runtime serves", 20, async || {
            if process.try_wait().unwrap().is_some() {
                return Some(None);
            }
            let endpoint = Endpoint::try_from(format!("unix://{}", socket.display())).unwrap();
            let channel = endpoint.connect().await.ok()?;
            let version = cri::VersionRequest::default();
            RuntimeServiceClient::new(channel.clone()).version(version).await.ok()?;
            Some(Some(channel))
        })
        .await?;
        let armed = armed.map(|armed| armed.split(':').next().unwrap_or_default());
        Some(Self {
            received: Arc::default(),
            listener: None,
            known: BTreeSet::new(),
            started: BTreeSet::new(),
            process,
            runtime: RuntimeServiceClient::new(channel.clone()),
            images: ImageServiceClient::new(channel),
            cgroup_parent: format!("/{}/kubepods/pod-uid", machine.name()),
            logs: machine.path("logs").display().to_string(),
            log: words,
            // Only a process that ignores the stop signal is killed.
            command: if armed == Some("stop.killed") {
                "trap '' TERM; exec sleep 9999"
            } else {
                "exec sleep 9999"
            },
            stops_whole: armed == Some("stop-pod.begun"),
            // The command must still run when the runtime is killed. Otherwise the next runtime has no process to kill.
            exec: if armed == Some("exec.begun") { LEFT_BEHIND } else { "echo alive" },
        })
    }

    /// Process id of the runtime.
    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Subscribes to events until the runtime exits.
    pub(crate) async fn listen(&mut self) {
        let events = self.runtime.get_container_events(cri::GetEventsRequest {}).await;
        let mut events = events.unwrap().into_inner();
        let received = Arc::clone(&self.received);
        self.listener = Some(tokio::spawn(async move {
            while let Ok(Some(event)) = events.message().await {
                received.lock().unwrap().push((event.container_id, event.container_event_type));
            }
        }));
    }

    /// Received events; all events if the runtime has exited.
    pub(crate) async fn received(&mut self) -> Received {
        if self.process.try_wait().unwrap().is_some()
            && let Some(listener) = self.listener.take()
        {
            listener.await.unwrap();
        }
        self.received.lock().unwrap().clone()
    }

    /// If there is a subscriber, waits until it has received the event of a completed call. So no event is in transit
    /// at the next step.
    async fn wait_for_event(&self, id: &str, what: i32) {
        let is_event = |(of, kind): &(String, i32)| of == id && *kind == what;
        if let Some(listener) = &self.listener {
            // After the runtime has exited, no more events arrive.
            soon(|| listener.is_finished() || self.received.lock().unwrap().iter().any(is_event)).await;
        }
    }

    /// Kills the runtime. Pods continue.
    pub(crate) fn stop(&mut self) {
        self.process.kill().ok();
        self.process.wait().unwrap();
    }

    /// Whether the runtime exited by itself.
    pub(crate) async fn has_crashed(&mut self) -> bool {
        soon(|| self.process.try_wait().unwrap().is_some()).await
    }

    /// Whether the log reports a shim that exited unexpectedly.
    pub(crate) async fn has_logged_a_shim_exit(&self) -> bool {
        soon(|| std::fs::read_to_string(&self.log).unwrap().contains("a shim ended unexpectedly")).await
    }

    /// Whether the subscriber received the deletion of every object. A runtime that is killed while an event is in transit
    /// has already recorded the event as delivered.
    pub(crate) async fn has_sent_all_deletions(&self) -> bool {
        soon(|| {
            let received = self.received.lock().unwrap();
            received.iter().all(|(of, _)| received.iter().any(|(ended, what)| ended == of && *what >= 2))
        })
        .await
    }

    /// All calls of a kubelet for an image, a pod and its container, from creation to removal.
    pub(crate) async fn full_lifecycle(&mut self) -> Result<(), Status> {
        let image = Some(cri::ImageSpec { image: IMAGE.into(), ..Default::default() });
        self.pull().await?;
        let sandbox = self.sandbox();
        let run = cri::RunPodSandboxRequest { config: Some(sandbox.clone()), ..Default::default() };
        let pod_sandbox_id = self.runtime.run_pod_sandbox(run).await?.into_inner().pod_sandbox_id;
        self.known.insert(pod_sandbox_id.clone());
        self.started.insert(pod_sandbox_id.clone());
        self.wait_for_event(&pod_sandbox_id, 1).await;
        let create = cri::CreateContainerRequest {
            pod_sandbox_id: pod_sandbox_id.clone(),
            config: Some(container(image.clone(), self.command)),
            sandbox_config: Some(sandbox),
        };
        let container_id = self.runtime.create_container(create).await?.into_inner().container_id;
        let id = || container_id.clone();
        self.known.insert(id());
        self.wait_for_event(&container_id, 0).await;
        self.runtime.start_container(cri::StartContainerRequest { container_id: id() }).await?;
        self.started.insert(id());
        self.wait_for_event(&container_id, 1).await;
        assert_eq!(self.exec(&container_id, self.exec).await?, "alive\n");
        self.change(&pod_sandbox_id, &container_id).await?;
        if !self.stops_whole {
            let stop = cri::StopContainerRequest { container_id: id(), timeout: 1 };
            self.runtime.stop_container(stop).await?;
            self.wait_for_event(&container_id, 2).await;
            self.runtime.remove_container(cri::RemoveContainerRequest { container_id: id() }).await?;
            self.wait_for_event(&container_id, 3).await;
        }
        self.end(&pod_sandbox_id).await?;
        self.wait_for_event(&pod_sandbox_id, 3).await;
        self.images.remove_image(cri::RemoveImageRequest { image }).await?;
        Ok(())
    }

    /// Calls of a kubelet for a running container: updates and execs.
    async fn change(&mut self, pod_sandbox_id: &str, container_id: &str) -> Result<(), Status> {
        let update = cri::UpdateContainerResourcesRequest {
            container_id: container_id.to_owned(),
            linux: Some(limits(2)),
            ..Default::default()
        };
        self.runtime.update_container_resources(update).await?;
        let update = cri::UpdatePodSandboxResourcesRequest {
            pod_sandbox_id: pod_sandbox_id.to_owned(),
            resources: Some(limits(2)),
            ..Default::default()
        };
        self.runtime.update_pod_sandbox_resources(update).await?;
        let reopen = cri::ReopenContainerLogRequest { container_id: container_id.to_owned() };
        self.runtime.reopen_container_log(reopen).await?;
        Ok(())
    }

    /// Runs a shell command in a container and returns its output.
    async fn exec(&mut self, container_id: &str, line: &str) -> Result<String, Status> {
        let cmd = ["sh", "-c", line].map(str::to_owned).to_vec();
        let exec = cri::ExecSyncRequest { container_id: container_id.to_owned(), cmd, timeout: 60 };
        let output = self.runtime.exec_sync(exec).await?.into_inner();
        match output.exit_code {
            0 => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
            code => Err(Status::unknown(format!("{code}: {}", String::from_utf8_lossy(&output.stderr)))),
        }
    }

    /// Pulls the image.
    pub(crate) async fn pull(&mut self) -> Result<(), Status> {
        let image = Some(cri::ImageSpec { image: IMAGE.into(), ..Default::default() });
        self.images.pull_image(cri::PullImageRequest { image, ..Default::default() }).await?;
        Ok(())
    }

    /// Checks that the lists match the kernel: a ready pod has its processes, a running container accepts execs, and no
    /// partial object is listed. Returns the number of ready pods.
    pub(crate) async fn lists_match_the_kernel(&mut self) -> Result<usize, String> {
        let say = |status: Status| status.to_string();
        let mut ready = 0;
        let sandboxes = self.runtime.list_pod_sandbox(cri::ListPodSandboxRequest::default()).await;
        for sandbox in sandboxes.map_err(say)?.into_inner().items {
            self.known.insert(sandbox.id.clone());
            let status = cri::PodSandboxStatusRequest { pod_sandbox_id: sandbox.id, verbose: true };
            let reported = self.runtime.pod_sandbox_status(status).await.map_err(say)?.into_inner();
            let status = reported.status.ok_or("a sandbox without a status")?;
            if status.state() == cri::PodSandboxState::SandboxReady {
                is_connected(&status.network.unwrap_or_default().ip, &reported.info)?;
                ready += 1;
            }
        }
        let containers = self.runtime.list_containers(cri::ListContainersRequest::default()).await;
        for container in containers.map_err(say)?.into_inner().containers {
            self.known.insert(container.id.clone());
            if container.state() != cri::ContainerState::ContainerRunning {
                continue;
            }
            self.matches_its_status(&container.id).await?;
        }
        Ok(ready)
    }

    /// Checks that a running container accepts execs, has the reported limits and no process of an abandoned exec.
    async fn matches_its_status(&mut self, id: &str) -> Result<(), String> {
        let say = |status: Status| status.to_string();
        let status = cri::ContainerStatusRequest { container_id: id.to_owned(), verbose: true };
        let reported = self.runtime.container_status(status).await.map_err(say)?.into_inner();
        let info: serde_json::Value = serde_json::from_str(&reported.info["info"]).unwrap();
        let limits =
            reported.status.and_then(|status| status.resources?.linux).ok_or("the status has no limits")?;
        let memory =
            "cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2>/dev/null; true";
        let memory = self.exec(id, memory).await.map_err(say)?;
        if memory.trim() != limits.memory_limit_in_bytes.to_string() {
            return Err(format!(
                "the memory limit is {}, not {}",
                memory.trim(),
                limits.memory_limit_in_bytes
            ));
        }
        let scores = [
            std::fs::read_to_string(format!("/proc/{}/oom_score_adj", info["pid"])).unwrap_or_default(),
            self.exec(id, "cat /proc/self/oom_score_adj").await.map_err(say)?,
        ]
        .concat();
        let wrong = |score: &str| score != limits.oom_score_adj.to_string();
        if scores.lines().any(wrong) {
            return Err(format!("the OOM scores are {scores:?}, not {}", limits.oom_score_adj));
        }
        eventually_async("the end of an abandoned command", 20, async || match self.exec(id, "ps").await {
            Ok(processes) => (!processes.contains(LEFT_BEHIND)).then_some(Ok(())),
            Err(status) => Some(Err(say(status))),
        })
        .await
    }

    /// Removes all listed objects.
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
        // There is no event if the container stopped under an earlier runtime.
        if self.received.lock().unwrap().contains(&(pod_sandbox_id.clone(), 1)) {
            self.wait_for_event(&pod_sandbox_id, 2).await;
        }
        self.runtime.remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id }).await?;
        Ok(())
    }

    fn sandbox(&self) -> cri::PodSandboxConfig {
        let metadata = cri::PodSandboxMetadata {
            name: "pod".into(),
            uid: "uid".into(),
            namespace: "default".into(),
            attempt: 0,
        };
        let port = |port, protocol: cri::Protocol| cri::PortMapping {
            protocol: protocol.into(),
            container_port: port,
            host_port: 8000 + port,
            ..Default::default()
        };
        let limit = |way| (format!("kubernetes.io/{way}-bandwidth"), "10M".to_owned());
        cri::PodSandboxConfig {
            annotations: ["ingress", "egress"].map(limit).into(),
            metadata: Some(metadata),
            log_directory: self.logs.clone(),
            port_mappings: vec![port(80, cri::Protocol::Tcp), port(81, cri::Protocol::Udp)],
            linux: Some(cri::LinuxPodSandboxConfig {
                cgroup_parent: self.cgroup_parent.clone(),
                ..Default::default()
            }),
            ..Default::default()
        }
    }
}

/// Checks that for each known and removed object every transition was received exactly once and in order.
pub(crate) fn received_once(
    received: &Received,
    known: &BTreeSet<String>,
    started: &BTreeSet<String>,
) -> Result<(), String> {
    let mut transitions: BTreeMap<&str, Vec<i32>> =
        known.iter().map(|id| (id.as_str(), Vec::new())).collect();
    received.iter().for_each(|(id, what)| transitions.entry(id).or_default().push(*what));
    // Created, started, stopped, deleted: 0 to 3.
    for (id, of_one) in transitions {
        let is_complete = if started.contains(id) {
            of_one == [0, 1, 2, 3]
        } else {
            of_one == [0, 1, 2, 3] || of_one == [0, 2, 3]
        };
        if !is_complete {
            return Err(format!("{id} has the transitions {of_one:?}"));
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
        linux: Some(cri::LinuxContainerConfig { resources: Some(limits(1)), ..Default::default() }),
        ..Default::default()
    }
}

/// `times` the minimum limits.
fn limits(times: i64) -> cri::LinuxContainerResources {
    cri::LinuxContainerResources {
        memory_limit_in_bytes: times * (64 << 20),
        cpu_shares: times * 128,
        oom_score_adj: times * 250,
        ..Default::default()
    }
}

/// Checks that a pod's address exists in its network namespace.
fn is_connected(address: &str, info: &HashMap<String, String>) -> Result<(), String> {
    let info: serde_json::Value = serde_json::from_str(&info["info"]).unwrap();
    let netns = format!("--net=/proc/{}/ns/net", info["pid"]);
    let output = Command::new("nsenter").args([&netns, "ip", "-o", "addr"]).output().unwrap();
    let inside = String::from_utf8_lossy(&output.stdout).into_owned();
    let is_inside = !address.is_empty() && inside.contains(&format!(" {address}/"));
    if is_inside {
        Ok(())
    } else {
        Err(format!("a ready pod does not have its address {address:?}: {inside}"))
    }
}

/// Polls a condition. Returns whether it became true within the time limit.
async fn soon(condition: impl FnMut() -> bool) -> bool {
    within_async(20, condition).await.is_some()
}
