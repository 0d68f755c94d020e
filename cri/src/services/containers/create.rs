//! CreateContainer: record, spec, directories, process. A failure undoes all steps.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_images::Image;
use coracle_proto::{cri, shim};
use cri::ContainerEventType::ContainerCreatedEvent;

use super::bundle::make_log_dir;
use super::check::{check, check_limits, check_privilege, seccomp_profile, security};
use super::pid_namespace::ShimCreate;
use super::service::ContainerService;
use crate::checkpoint;
use crate::clock::now;
use crate::container::config_memory::{ConfigMemory, bytes_of_image};
use crate::container::{self, Container, fields, signal};
use crate::error::Error;
use crate::names::Claim;
use crate::namespaces;
use crate::nri::PodOf;
use crate::records::{ContainerPhase, ContainerRecord, RestoreRecord};
use crate::sandbox::Sandbox;
use crate::sandbox::user_namespace::Mapping;
use crate::selinux::PodLabels;
use crate::services::images::image_error;
use crate::services::new_id;
use crate::steps::Steps;
use crate::undo::{Step, Undo};

/// The checkpoint that a restored container comes from.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    /// The container's archive in the pod's checkpoint.
    pub(crate) archive: PathBuf,
    pub(crate) restore: RestoreRecord,
}

/// A container to create. Its name is claimed for its id.
#[derive(Debug)]
pub(crate) struct ContainerRequest {
    pub(crate) id: String,
    pub(crate) config: cri::ContainerConfig,
    /// `None` for a container that starts from its image.
    pub(crate) origin: Option<Origin>,
}

fn too_large() -> Error {
    Error::invalid(
        "envs, command, args, mounts, supplemental_groups",
        "are too large together with those of the other containers of this node",
    )
}

impl ContainerService {
    /// Validates the request and claims the container's name. Refuses a name that another container of the pod has. Waits
    /// for a container of this name that is being created or undone.
    pub(crate) async fn container_claim(
        &self,
        request: &cri::CreateContainerRequest,
    ) -> Result<Claim, Error> {
        let sandbox = self.objects.tables.sandbox(&request.pod_sandbox_id)?;
        let config = request.config.as_ref().ok_or_else(Error::no_config)?;
        // The request has the pod's current configuration: a privileged container may have been added to the pod after
        // its sandbox was created.
        let pods = [Some(sandbox.config()), request.sandbox_config.as_ref()];
        check_privilege(config, pods.into_iter().flatten())?;
        self.claim_name(&sandbox, config).await
    }

    /// Validates a configuration and claims the container's name.
    pub(crate) async fn claim_name(
        &self,
        sandbox: &Sandbox,
        config: &cri::ContainerConfig,
    ) -> Result<Claim, Error> {
        check(config, &self.machine.host)?;
        fields::check_shared(config, &namespaces::options(sandbox.config()))?;
        let metadata = config.metadata.clone().unwrap_or_default();
        self.objects.names.claim(container::name(&metadata, &sandbox.id), new_id()).await
    }

    /// Creates a container whose name is claimed for this id. The container is not started.
    pub(crate) async fn container_create(
        &self,
        request: cri::CreateContainerRequest,
        container_id: String,
    ) -> Result<cri::CreateContainerResponse, Error> {
        let sandbox = self.objects.tables.sandbox(&request.pod_sandbox_id)?;
        let config = request.config.ok_or_else(Error::no_config)?;
        let new = ContainerRequest { id: container_id.clone(), config, origin: None };
        self.create_or_undo(&sandbox, new).await?;
        Ok(cri::CreateContainerResponse { container_id })
    }

    /// Creates a container, from its image or a checkpoint. A failure undoes all steps.
    pub(crate) async fn create_or_undo(
        &self,
        sandbox: &Sandbox,
        request: ContainerRequest,
    ) -> Result<(), Error> {
        let mut undo = Undo::new(&self.undo);
        let created = self.create(sandbox, request, &mut undo).await;
        undo.finish(created).await
    }

    async fn create(
        &self,
        sandbox: &Sandbox,
        request: ContainerRequest,
        undo: &mut Undo,
    ) -> Result<(), Error> {
        let mut steps = Steps::begin();
        let ContainerRequest { id, mut config, origin } = request;
        let live = sandbox.live_for_containers()?;
        let pod = PodOf { sandbox, live: &live };
        let image = self.image_of(&config)?;
        let memory = ConfigMemory::take(&config, bytes_of_image(&image)).ok_or_else(too_large)?;
        if let Some(profile) = seccomp_profile(&config)? {
            let linux = config.linux.get_or_insert_default();
            linux.security_context.get_or_insert_default().seccomp = Some(profile);
        }
        let mut held = self.hold_images(&mut config)?;
        held.push(self.images.hold(&image.id).map_err(|source| image_error(&image.id, source))?);
        let mut record = self.new_record(sandbox, id.clone(), config, &image)?;
        record.restore = origin.as_ref().map(|origin| Box::new(origin.restore.clone()));
        self.record_new(sandbox, &mut record, undo)?;
        steps.done("record");
        self.machine.profiles.load_default_apparmor(&security(&record.config)).await?;
        let config = self.find_volumes(&record).await?;
        make_log_dir(Path::new(&record.log_path)).await?;
        let mut spec = self.make_spec(pod, &record, &config, &image)?;
        self.relabel_volumes(sandbox, &record).await?;
        let _guard = self.transitions.hooks.block_joins().await;
        self.transitions.hooks.create_container(pod, &mut record, &mut spec, undo).await?;
        check_limits(&spec, self.machine.host.unified)?;
        let profile = spec.linux().as_ref().and_then(|linux| linux.seccomp().as_ref());
        let seccomp_program = self.machine.profiles.seccomp_program(profile).await?;
        let call = self.write_bundle(sandbox, &record, &image, &spec)?;
        let call = shim::CreateContainer { seccomp_program, ..call };
        self.unpack_checkpoint(&id, origin).await?;
        coracle_fault::point("create.bundle");
        steps.done("spec and directories");
        let container = Arc::new(Container::new(record, held, memory));
        undo.push(Step::Container(id.clone()));
        self.objects.tables.containers.insert(&id, Arc::clone(&container));
        self.create_process(pod, ShimCreate { container: &container, call }, &mut steps, undo).await?;
        self.transitions.hooks.post_create_container(&container).await;
        steps.finish("CreateContainer", &id);
        Ok(())
    }

    /// Writes the record of a container that is being created.
    fn record_new(
        &self,
        sandbox: &Sandbox,
        record: &mut ContainerRecord,
        undo: &mut Undo,
    ) -> Result<(), Error> {
        let id = record.id.clone();
        undo.push(Step::Level(id.clone()));
        let pod = PodLabels { config: sandbox.config(), labels: sandbox.record.selinux.as_ref() };
        record.selinux = self.machine.selinux.label_container(&id, &record.config, pod)?;
        undo.push(Step::ContainerRecord(id));
        self.objects.records.write_container(record)?;
        coracle_fault::point("create.recorded");
        undo.push(Step::Cgroup(record.cgroup.clone()));
        Ok(())
    }

    /// Lets the shim create the container's first process, and records the container as created.
    async fn create_process(
        &self,
        pod: PodOf<'_>,
        create: ShimCreate<'_>,
        steps: &mut Steps,
        undo: &mut Undo,
    ) -> Result<(), Error> {
        let container = create.container;
        // The lock delays the record of the container's end until the creation is recorded.
        let _exits_wait = container.starting.lock().await;
        // A stop that began before this check may not have found the container. A later stop waits for the lock.
        pod.sandbox.live_for_containers()?;
        undo.push(Step::ShimContainer(pod.live.shim.clone(), container.id.clone()));
        let pid = self.create_in_shim(pod, create).await?;
        coracle_fault::point("create.made");
        steps.done("creator");
        container.created(pid);
        let pending = self.transitions.outbox.record_transition(container, ContainerCreatedEvent)?;
        coracle_fault::point("create.ready");
        pending.send_for_container(container);
        steps.done("ready");
        Ok(())
    }

    /// Unpacks the files of a checkpoint into the writable layer.
    async fn unpack_checkpoint(&self, id: &str, origin: Option<Origin>) -> Result<(), Error> {
        let Some(Origin { archive, .. }) = origin else { return Ok(()) };
        let layer = self.objects.records.layer_dir(id);
        let work = coracle_threads::spawn_blocking(move || checkpoint::unpack_checkpoint(&archive, &layer));
        let done = work.await.map_err(Error::panicked("unpack the checkpoint"))?;
        done.map_err(|source| Error::Checkpoint { what: "container", id: id.to_owned(), source })
    }

    /// The image of a container's configuration.
    pub(crate) fn image_of(&self, config: &cri::ContainerConfig) -> Result<Image, Error> {
        let reference = config.image.as_ref().map(|image| image.image.as_str()).unwrap_or_default();
        if reference.is_empty() {
            return Err(Error::invalid("config.image", "is missing"));
        }
        self.image(reference)
    }

    /// The image with this reference or id.
    pub(super) fn image(&self, reference: &str) -> Result<Image, Error> {
        let absent = || Error::NotFound { what: "image", id: reference.to_owned() };
        self.images.get(reference).ok_or_else(absent)
    }

    fn new_record(
        &self,
        sandbox: &Sandbox,
        id: String,
        config: cri::ContainerConfig,
        image: &Image,
    ) -> Result<ContainerRecord, Error> {
        let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
        let accounts = self.image_files.accounts(image);
        let user = accounts.resolve(security, image.user()).map_err(|why| Error::invalid("user", why))?;
        let options = security.and_then(|security| security.namespace_options.as_ref());
        Mapping::of_container(&namespaces::options(sandbox.config()), options)
            .and_then(|mapping| mapping.map_or(Ok(()), |mapping| mapping.check_ids(user.uid, &user.groups)))
            .map_err(|why| Error::invalid("namespace_options.userns_options", why))?;
        let stop_signal = signal::stop_signal(config.stop_signal(), image.stop_signal())
            .map_err(|why| Error::invalid("stop_signal", why))?;
        let cgroup = self.machine.layout.container(&sandbox.cgroup(&self.machine.layout), &id);
        Ok(ContainerRecord {
            version: ContainerRecord::VERSION,
            sandbox_id: sandbox.id.clone(),
            phase: ContainerPhase::Creating,
            created_at: now(),
            image_id: image.id.clone(),
            image_digest: container::image_digest(&config, &image.digests),
            log_path: container::log_path(&config, sandbox.config()),
            cgroup,
            stop_signal,
            uid: user.uid.into(),
            gid: user.gid.into(),
            groups: user.groups.iter().map(|gid| i64::from(*gid)).collect(),
            late_hooks: false,
            selinux: None,
            pid: 0,
            restore: None,
            transitions: Vec::new(),
            config,
            id,
        })
    }
}
