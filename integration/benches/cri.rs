//! Measures the CRI v1 calls of a kubelet on the runtime at `--endpoint` and prints JSON. scripts/bench-cri compares two
//! runtimes with it.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a measurement that fails has no result")]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use coracle_proto::cri::image_service_client::ImageServiceClient;
use coracle_proto::cri::runtime_service_client::RuntimeServiceClient;
use coracle_proto::cri::{
    ContainerConfig, ContainerMetadata, CreateContainerRequest, ExecSyncRequest, ImageSpec,
    ImageStatusRequest, LinuxContainerConfig, LinuxContainerSecurityContext, LinuxPodSandboxConfig,
    PodSandboxConfig, PodSandboxMetadata, PullImageRequest, RemoveContainerRequest, RemoveImageRequest,
    RemovePodSandboxRequest, RunPodSandboxRequest, SecurityProfile, StartContainerRequest,
    StopContainerRequest, StopPodSandboxRequest, security_profile,
};
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tonic::transport::{Channel, Endpoint};

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Operations in the order of a pod's life. `STARTED` is the sum of the first three, `ENDED` of the last four.
const STARTED: &str = "Run+Create+Start";
const ENDED: &str = "Stop+Remove";
const OPERATIONS: [&str; 10] = [
    "RunPodSandbox",
    "CreateContainer",
    "StartContainer",
    STARTED,
    "ExecSync",
    "StopContainer",
    "RemoveContainer",
    "StopPodSandbox",
    "RemovePodSandbox",
    ENDED,
];

/// Measures a CRI runtime: a pod of one container at a time, then several at once.
#[derive(Parser)]
struct Arguments {
    /// Socket of the runtime.
    #[arg(long, value_name = "unix://PATH")]
    endpoint: String,
    /// Image of the containers, pulled first if absent. Its default command must keep running.
    #[arg(long, value_name = "NAME", default_value = "docker.io/library/nginx:latest")]
    image: String,
    /// Pods measured one at a time.
    #[arg(long, default_value_t = 20)]
    count: usize,
    /// Pods started and stopped in parallel. The default is --count.
    #[arg(long, value_name = "PODS")]
    many: Option<usize>,
    /// Number of parallel starts; 0 disables this part.
    #[arg(long, default_value_t = 4)]
    parallel: usize,
    /// Instead of pods, measure pulling and removing these images, `parallel` at a time.
    #[arg(long, value_name = "NAME")]
    pull: Vec<String>,
    /// Instead of measuring, start this many pods, print `held`, and keep them until standard input closes.
    #[arg(long, value_name = "PODS")]
    hold: Option<usize>,
    /// Parent cgroup of the pods. The default is the runtime's choice.
    #[arg(long, value_name = "PATH", default_value = "")]
    cgroup_parent: String,
    /// Containers have the runtime's default seccomp profile, as the restricted pod security standard demands.
    #[arg(long)]
    seccomp: bool,
    /// Directory of container logs.
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
    /// `cargo bench` passes this flag.
    #[arg(long, hide = true)]
    bench: bool,
}

/// A pod with one running container.
struct Pod {
    sandbox: String,
    container: String,
}

/// Durations of each operation, one sample per pod.
#[derive(Default)]
struct Samples(BTreeMap<&'static str, Vec<Duration>>);

impl Samples {
    fn add(&mut self, operation: &'static str, begin: Instant) {
        self.0.entry(operation).or_default().push(begin.elapsed());
    }

    /// p50, p99 and all samples of each operation, in milliseconds.
    fn report(&self) -> serde_json::Value {
        let mut report = serde_json::Map::new();
        for operation in OPERATIONS {
            let Some(samples) = self.0.get(operation) else { continue };
            let mut sorted: Vec<f64> = samples.iter().map(|s| milliseconds(*s)).collect();
            sorted.sort_by(f64::total_cmp);
            let at = |percent: usize| sorted[(sorted.len() * percent).div_ceil(100).max(1) - 1];
            report.insert(operation.into(), json!({ "p50": at(50), "p99": at(99), "samples": sorted }));
        }
        report.into()
    }
}

fn with_seccomp() -> LinuxContainerConfig {
    let seccomp = SecurityProfile {
        profile_type: security_profile::ProfileType::RuntimeDefault.into(),
        ..Default::default()
    };
    let security = LinuxContainerSecurityContext { seccomp: Some(seccomp), ..Default::default() };
    LinuxContainerConfig { security_context: Some(security), ..Default::default() }
}

fn milliseconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

/// A runtime under measurement. Clones share the connection.
#[derive(Clone)]
struct Runtime {
    runtime: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
    arguments: Arc<Arguments>,
}

impl Runtime {
    async fn connect(arguments: Arguments) -> Result<Self, Error> {
        let channel = Endpoint::try_from(arguments.endpoint.clone())?.connect().await?;
        let runtime = RuntimeServiceClient::new(channel.clone());
        Ok(Self { runtime, images: ImageServiceClient::new(channel), arguments: Arc::new(arguments) })
    }

    fn image(&self) -> ImageSpec {
        ImageSpec { image: self.arguments.image.clone(), ..Default::default() }
    }

    async fn pull(&mut self) -> Result<(), Error> {
        let image = Some(self.image());
        let status = ImageStatusRequest { image: image.clone(), ..Default::default() };
        if self.images.image_status(status).await?.into_inner().image.is_none() {
            self.images.pull_image(PullImageRequest { image, ..Default::default() }).await?;
        }
        Ok(())
    }

    fn sandbox_config(&self, name: &str) -> PodSandboxConfig {
        let metadata = PodSandboxMetadata {
            name: name.to_owned(),
            uid: format!("{name}-uid"),
            namespace: "bench".to_owned(),
            attempt: 0,
        };
        let logs = &self.arguments.log_dir;
        let linux = LinuxPodSandboxConfig {
            cgroup_parent: self.arguments.cgroup_parent.clone(),
            ..Default::default()
        };
        PodSandboxConfig {
            metadata: Some(metadata),
            hostname: name.to_owned(),
            log_directory: match logs {
                None => String::new(),
                Some(logs) => logs.join(name).to_string_lossy().into_owned(),
            },
            linux: Some(linux),
            ..Default::default()
        }
    }

    fn container_config(&self) -> ContainerConfig {
        let logs = self.arguments.log_dir.is_some();
        ContainerConfig {
            metadata: Some(ContainerMetadata { name: "main".to_owned(), attempt: 0 }),
            image: Some(self.image()),
            log_path: if logs { "main.log".to_owned() } else { String::new() },
            linux: self.arguments.seccomp.then(with_seccomp),
            ..Default::default()
        }
    }

    async fn start(&mut self, name: &str, samples: &mut Samples) -> Result<Pod, Error> {
        let config = self.sandbox_config(name);
        if !config.log_directory.is_empty() {
            std::fs::create_dir_all(&config.log_directory)?;
        }
        let begin = Instant::now();
        let run = RunPodSandboxRequest { config: Some(config.clone()), ..Default::default() };
        let sandbox = self.runtime.run_pod_sandbox(run).await?.into_inner().pod_sandbox_id;
        samples.add("RunPodSandbox", begin);

        let step = Instant::now();
        let create = CreateContainerRequest {
            pod_sandbox_id: sandbox.clone(),
            config: Some(self.container_config()),
            sandbox_config: Some(config),
        };
        let container = self.runtime.create_container(create).await?.into_inner().container_id;
        samples.add("CreateContainer", step);

        let step = Instant::now();
        self.runtime.start_container(StartContainerRequest { container_id: container.clone() }).await?;
        samples.add("StartContainer", step);
        samples.add(STARTED, begin);
        Ok(Pod { sandbox, container })
    }

    async fn exec(&mut self, pod: &Pod, samples: &mut Samples) -> Result<(), Error> {
        let request = ExecSyncRequest {
            container_id: pod.container.clone(),
            cmd: vec!["true".to_owned()],
            timeout: 10,
        };
        let begin = Instant::now();
        let answer = self.runtime.exec_sync(request).await?.into_inner();
        samples.add("ExecSync", begin);
        if answer.exit_code != 0 {
            return Err(format!("true exited with {}", answer.exit_code).into());
        }
        Ok(())
    }

    /// Stops and removes a pod, without a grace period: the image's reaction to the stop signal is not measured.
    async fn stop(&mut self, pod: Pod, samples: &mut Samples) -> Result<(), Error> {
        let Pod { sandbox, container } = pod;
        let begin = Instant::now();
        let step = begin;
        let stop = StopContainerRequest { container_id: container.clone(), timeout: 0 };
        self.runtime.stop_container(stop).await?;
        samples.add("StopContainer", step);

        let step = Instant::now();
        self.runtime.remove_container(RemoveContainerRequest { container_id: container }).await?;
        samples.add("RemoveContainer", step);

        let step = Instant::now();
        self.runtime.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: sandbox.clone() }).await?;
        samples.add("StopPodSandbox", step);

        let step = Instant::now();
        self.runtime.remove_pod_sandbox(RemovePodSandboxRequest { pod_sandbox_id: sandbox }).await?;
        samples.add("RemovePodSandbox", step);
        samples.add(ENDED, begin);
        Ok(())
    }

    async fn one_at_a_time(&mut self) -> Result<Samples, Error> {
        let mut samples = Samples::default();
        for number in 0..self.arguments.count {
            let pod = self.start(&format!("single-{number}"), &mut samples).await?;
            self.exec(&pod, &mut samples).await?;
            self.stop(pod, &mut samples).await?;
        }
        Ok(samples)
    }

    /// Starts `count` pods, `width` in parallel, and returns them.
    async fn start_many(&self, count: usize, width: usize) -> Result<Vec<Pod>, Error> {
        let permits = Arc::new(Semaphore::new(width));
        let mut tasks = JoinSet::new();
        for number in 0..count {
            let (mut runtime, permits) = (self.clone(), permits.clone());
            tasks.spawn(async move {
                let _permit = permits.acquire().await?;
                runtime.start(&format!("many-{number}"), &mut Samples::default()).await
            });
        }
        let mut pods = Vec::with_capacity(count);
        while let Some(pod) = tasks.join_next().await {
            pods.push(pod??);
        }
        Ok(pods)
    }

    /// Stops and removes `pods`, `width` in parallel.
    async fn stop_many(&self, pods: Vec<Pod>, width: usize) -> Result<(), Error> {
        let permits = Arc::new(Semaphore::new(width));
        let mut tasks = JoinSet::new();
        for pod in pods {
            let (mut runtime, permits) = (self.clone(), permits.clone());
            tasks.spawn(async move {
                let _permit = permits.acquire().await?;
                runtime.stop(pod, &mut Samples::default()).await
            });
        }
        while let Some(stopped) = tasks.join_next().await {
            stopped??;
        }
        Ok(())
    }

    async fn measure(&mut self) -> Result<serde_json::Value, Error> {
        let (many, parallel) = (self.arguments.many.unwrap_or(self.arguments.count), self.arguments.parallel);
        let mut report = json!({ "operations": self.one_at_a_time().await?.report() });
        if parallel > 0 && many > 0 {
            let per_second = |begin: Instant| many as f64 / begin.elapsed().as_secs_f64();
            let begin = Instant::now();
            let pods = self.start_many(many, parallel).await?;
            report["started_per_second"] = per_second(begin).into();
            let begin = Instant::now();
            self.stop_many(pods, parallel).await?;
            report["removed_per_second"] = per_second(begin).into();
        }
        Ok(report)
    }

    /// Milliseconds until all images are pulled, and until all are removed.
    async fn pull_all(&self) -> Result<serde_json::Value, Error> {
        let begin = Instant::now();
        self.for_images(|mut runtime, image| async move {
            let request = PullImageRequest { image: Some(image), ..Default::default() };
            runtime.images.pull_image(request).await.map(drop)
        })
        .await?;
        let pulled = begin.elapsed();
        let begin = Instant::now();
        self.for_images(|mut runtime, image| async move {
            runtime.images.remove_image(RemoveImageRequest { image: Some(image) }).await.map(drop)
        })
        .await?;
        Ok(json!({ "pulled": milliseconds(pulled), "removed": milliseconds(begin.elapsed()) }))
    }

    async fn for_images<F>(&self, act: impl Fn(Self, ImageSpec) -> F) -> Result<(), Error>
    where
        F: Future<Output = Result<(), tonic::Status>> + Send + 'static,
    {
        let permits = Arc::new(Semaphore::new(self.arguments.parallel.max(1)));
        let mut tasks = JoinSet::new();
        for name in &self.arguments.pull {
            let permits = permits.clone();
            let acting = act(self.clone(), ImageSpec { image: name.clone(), ..Default::default() });
            tasks.spawn(async move {
                let _permit = permits.acquire().await?;
                Ok::<_, Error>(acting.await?)
            });
        }
        while let Some(done) = tasks.join_next().await {
            done??;
        }
        Ok(())
    }

    /// Prints `held` when `count` pods run, and keeps them until standard input closes.
    async fn hold(&self, count: usize) -> Result<(), Error> {
        let pods = self.start_many(count, 2).await?;
        writeln!(std::io::stdout(), "held")?;
        tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new())).await??;
        self.stop_many(pods, 2).await
    }
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let mut runtime = Runtime::connect(Arguments::parse()).await?;
    if !runtime.arguments.pull.is_empty() {
        let report = runtime.pull_all().await?;
        writeln!(std::io::stdout(), "{report}")?;
        return Ok(());
    }
    runtime.pull().await?;
    if let Some(count) = runtime.arguments.hold {
        return runtime.hold(count).await;
    }
    let report = runtime.measure().await?;
    writeln!(std::io::stdout(), "{report:#}")?;
    Ok(())
}
