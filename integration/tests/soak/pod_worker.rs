//! A worker that runs one pod after another with random operations.

use std::fmt;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use coracle_integration::Machine;
use coracle_proto::cri;
use coracle_proto::cri::image_service_client::ImageServiceClient;
use coracle_proto::cri::runtime_service_client::RuntimeServiceClient;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use crate::node::IMAGE;
use crate::random::Random;

const LABEL: &str = "soak";

/// Counters of all workers.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Odd during a disturbance.
    pub(crate) disturbances: AtomicU64,
    pub(crate) runtimes: AtomicU64,
    pub(crate) shims: AtomicU64,
    complete: AtomicU64,
    disturbed: AtomicU64,
    cancelled: AtomicU64,
    execs: AtomicU64,
}

/// A worker. It has one pod at a time. Each of its pods has its name as a label.
pub(crate) struct PodWorker {
    runtime: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
    name: String,
    attempt: u32,
    cgroup_parent: String,
    logs: PathBuf,
    random: Random,
    counters: Arc<Counters>,
    sandbox: Option<String>,
    /// Whether calls are cancelled at random.
    cancels: bool,
}

/// The behaviour of a container.
enum Command {
    /// Runs until the stop signal.
    ExitsOnSignal,
    /// Ignores the stop signal and runs until SIGKILL.
    IgnoresSignal,
    /// Exits with this code.
    ExitsWithCode(i32),
}

// === impl PodWorker ===

impl PodWorker {
    pub(crate) fn new(machine: &Machine, name: &str, random: Random, counters: Arc<Counters>) -> Self {
        let socket = format!("unix://{}", machine.path("cri.sock").display());
        let channel = Endpoint::try_from(socket).unwrap().connect_lazy();
        Self {
            runtime: RuntimeServiceClient::new(channel.clone()),
            images: ImageServiceClient::new(channel),
            name: name.to_owned(),
            attempt: 0,
            // The kubelet creates this cgroup, so the runtime must not remove it.
            cgroup_parent: format!("/{}/kubepods/pod-uid", machine.name()),
            logs: machine.path("worker-logs").join(name),
            random,
            counters,
            sandbox: None,
            cancels: false,
        }
    }

    /// Runs a pod from creation to removal. Without a disturbance each call must succeed. After a disturbance, the pod
    /// is removed.
    pub(crate) async fn run_pod(&mut self) {
        let before = self.counters.disturbances.load(Ordering::SeqCst);
        self.cancels = true;
        match self.complete().await {
            Ok(()) => {
                self.counters.complete.fetch_add(1, Ordering::SeqCst);
                return;
            }
            Err(status) if status.code() == Code::Cancelled => {
                self.counters.cancelled.fetch_add(1, Ordering::SeqCst);
            }
            Err(status) => {
                let after = self.counters.disturbances.load(Ordering::SeqCst);
                assert!(
                    before % 2 == 1 || before != after,
                    "{}: a call failed without a disturbance: {status}",
                    self.name
                );
                self.counters.disturbed.fetch_add(1, Ordering::SeqCst);
            }
        }
        self.clear().await;
    }

    /// A copy of the generator of this worker.
    pub(crate) fn random(&self) -> Random {
        self.random.clone()
    }

    /// Id of the current pod.
    pub(crate) fn sandbox(&self) -> &str {
        self.sandbox.as_deref().unwrap_or_default()
    }

    /// Starts a pod with one container that keeps running.
    pub(crate) async fn start_long_running(&mut self) -> Result<(), Status> {
        let config = self.config();
        let sandbox = self.run(config.clone()).await?;
        self.start(&sandbox, &config, 0, &Command::ExitsOnSignal).await?;
        self.sandbox = Some(sandbox);
        Ok(())
    }

    /// Removes the pod of [`start_long_running`](Self::start_long_running).
    pub(crate) async fn stop_long_running(&mut self) -> Result<(), Status> {
        match self.sandbox.take() {
            Some(sandbox) => self.remove(&sandbox).await,
            None => Ok(()),
        }
    }

    /// Removes all pods of this worker. Tries again while the runtime restarts.
    ///
    /// # Panics
    /// When it does not succeed for two minutes.
    pub(crate) async fn clear(&mut self) {
        let mut last = None;
        for _ in 0..1200 {
            match self.try_clear().await {
                Ok(()) => return,
                Err(status) => last = Some(status),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("{}: cannot remove the pods: {last:?}", self.name);
    }

    async fn try_clear(&mut self) -> Result<(), Status> {
        let filter = cri::PodSandboxFilter {
            label_selector: [(LABEL.to_owned(), self.name.clone())].into(),
            ..Default::default()
        };
        let list = cri::ListPodSandboxRequest { filter: Some(filter) };
        for sandbox in self.runtime.list_pod_sandbox(list).await?.into_inner().items {
            self.remove(&sandbox.id).await?;
        }
        Ok(())
    }

    async fn complete(&mut self) -> Result<(), Status> {
        let config = self.config();
        if self.random.below(8) == 0 {
            let image = Some(cri::ImageSpec { image: IMAGE.into(), ..Default::default() });
            self.images.pull_image(cri::PullImageRequest { image, ..Default::default() }).await?;
        }
        let sandbox = self.run(config.clone()).await?;
        let mut containers = Vec::new();
        for number in 0..=self.random.below(2) {
            let command = match self.random.below(4) {
                0 => Command::ExitsWithCode(self.random.below(120) as i32),
                1 => Command::IgnoresSignal,
                _ => Command::ExitsOnSignal,
            };
            containers.push((self.start(&sandbox, &config, number, &command).await?, command));
        }
        for (container, command) in &containers {
            match command {
                Command::ExitsWithCode(code) => self.wait_for_exit_code(container, *code).await?,
                Command::ExitsOnSignal | Command::IgnoresSignal => self.run_execs(container).await?,
            }
        }
        for (container, _) in containers {
            // StopPodSandbox stops running containers; RemovePodSandbox removes all containers.
            if self.random.below(3) > 0 {
                let timeout = self.random.below(2) as i64;
                let stop = cri::StopContainerRequest { container_id: container.clone(), timeout };
                self.runtime.stop_container(stop).await?;
                let remove = cri::RemoveContainerRequest { container_id: container };
                self.runtime.remove_container(remove).await?;
            }
        }
        self.remove(&sandbox).await
    }

    async fn run(&mut self, config: cri::PodSandboxConfig) -> Result<String, Status> {
        let mut runtime = self.runtime.clone();
        let run = cri::RunPodSandboxRequest { config: Some(config), ..Default::default() };
        let answer = self.maybe_cancelled(runtime.run_pod_sandbox(run)).await?;
        Ok(answer.into_inner().pod_sandbox_id)
    }

    async fn start(
        &mut self,
        sandbox: &str,
        config: &cri::PodSandboxConfig,
        number: u64,
        command: &Command,
    ) -> Result<String, Status> {
        let script = match command {
            Command::ExitsOnSignal => "trap 'exit 0' TERM; sleep 9999 & wait".to_owned(),
            Command::IgnoresSignal => "trap '' TERM; while true; do sleep 9999; done".to_owned(),
            Command::ExitsWithCode(code) => format!("echo ending; exit {code}"),
        };
        let container = cri::ContainerConfig {
            metadata: Some(cri::ContainerMetadata { name: format!("c{number}"), attempt: 0 }),
            image: Some(cri::ImageSpec { image: IMAGE.into(), ..Default::default() }),
            command: ["sh", "-c", &script].map(str::to_owned).to_vec(),
            log_path: format!("{number}.log"),
            ..Default::default()
        };
        let create = cri::CreateContainerRequest {
            pod_sandbox_id: sandbox.to_owned(),
            config: Some(container),
            sandbox_config: Some(config.clone()),
        };
        let mut runtime = self.runtime.clone();
        let created = self.maybe_cancelled(runtime.create_container(create)).await?.into_inner();
        let container_id = created.container_id;
        let start = cri::StartContainerRequest { container_id: container_id.clone() };
        self.maybe_cancelled(runtime.start_container(start)).await?;
        Ok(container_id)
    }

    /// Runs some commands in the container and checks their output and exit codes.
    async fn run_execs(&mut self, container: &str) -> Result<(), Status> {
        for _ in 0..self.random.below(5) {
            let size = self.random.below(100_000);
            let code = self.random.below(100) as i32;
            let script = format!("head -c {size} /dev/zero; exit {code}");
            let cmd = ["sh", "-c", &script].map(str::to_owned).to_vec();
            let exec = cri::ExecSyncRequest { container_id: container.to_owned(), cmd, timeout: 60 };
            let output = self.runtime.exec_sync(exec).await?.into_inner();
            self.counters.execs.fetch_add(1, Ordering::SeqCst);
            if output.exit_code != code || output.stdout.len() as u64 != size {
                let (length, ended) = (output.stdout.len(), output.exit_code);
                return Err(Status::unknown(format!(
                    "{length} bytes of {size}, and code {ended} instead of {code}"
                )));
            }
        }
        if self.random.below(10) == 0 {
            let cmd = ["sh", "-c", "sleep 99 & sleep 99"].map(str::to_owned).to_vec();
            let exec = cri::ExecSyncRequest { container_id: container.to_owned(), cmd, timeout: 1 };
            match self.runtime.exec_sync(exec).await {
                Err(status) if status.code() == Code::DeadlineExceeded => {}
                Err(status) => return Err(status),
                Ok(_) => return Err(Status::unknown("an exec ran longer than its timeout")),
            }
        }
        Ok(())
    }

    async fn wait_for_exit_code(&mut self, container: &str, code: i32) -> Result<(), Status> {
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(60) {
            let request = cri::ContainerStatusRequest { container_id: container.to_owned(), verbose: false };
            let status = self.runtime.container_status(request).await?.into_inner().status;
            let status = status.ok_or_else(|| Status::unknown("a container without a status"))?;
            if status.state() == cri::ContainerState::ContainerExited {
                let message = format!("exit code {} instead of {code}", status.exit_code);
                return (status.exit_code == code).then_some(()).ok_or_else(|| Status::unknown(message));
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Err(Status::unknown("the container did not exit"))
    }

    async fn remove(&mut self, sandbox: &str) -> Result<(), Status> {
        let pod_sandbox_id = sandbox.to_owned();
        let stop = cri::StopPodSandboxRequest { pod_sandbox_id: pod_sandbox_id.clone() };
        self.runtime.stop_pod_sandbox(stop).await?;
        self.runtime.remove_pod_sandbox(cri::RemovePodSandboxRequest { pod_sandbox_id }).await?;
        Ok(())
    }

    /// The response, or [`Code::Cancelled`] if the client cancels the call at random.
    async fn maybe_cancelled<T>(
        &mut self,
        call: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        let timeout = if self.cancels && self.random.below(16) == 0 { self.random.below(30) } else { 60_000 };
        let answer = tokio::time::timeout(Duration::from_millis(timeout), call).await;
        answer.unwrap_or_else(|_| Err(Status::cancelled("cancelled by the test")))
    }

    fn config(&mut self) -> cri::PodSandboxConfig {
        self.attempt += 1;
        let metadata = cri::PodSandboxMetadata {
            name: self.name.clone(),
            uid: format!("uid-{}", self.name),
            namespace: "default".into(),
            attempt: self.attempt,
        };
        let mut namespaces = cri::NamespaceOption::default();
        namespaces.set_pid(match self.random.below(2) {
            0 => cri::NamespaceMode::Pod,
            _ => cri::NamespaceMode::Container,
        });
        let security =
            cri::LinuxSandboxSecurityContext { namespace_options: Some(namespaces), ..Default::default() };
        cri::PodSandboxConfig {
            metadata: Some(metadata),
            labels: [(LABEL.to_owned(), self.name.clone())].into(),
            log_directory: self.logs.display().to_string(),
            linux: Some(cri::LinuxPodSandboxConfig {
                cgroup_parent: self.cgroup_parent.clone(),
                security_context: Some(security),
                ..Default::default()
            }),
            ..Default::default()
        }
    }
}

impl fmt::Display for Counters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [complete, disturbed, cancelled, execs, runtimes, shims] =
            [&self.complete, &self.disturbed, &self.cancelled, &self.execs, &self.runtimes, &self.shims]
                .map(|count| count.load(Ordering::SeqCst));
        write!(
            f,
            "{complete} pods completed, {disturbed} disturbed, {cancelled} cancelled; {execs} execs; kills: {runtimes} of \
             the runtime, {shims} of shims"
        )
    }
}
