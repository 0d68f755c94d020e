//! RestorePod: a new sandbox with containers that wait to be started, and go on then where a checkpoint was made.
//!
//! Everything but the processes comes by the ordinary way. Whatever can be refused is, before anything is made. A name
//! is claimed as by RunPodSandbox: of the CRI's calls the two are among those that are not called idempotent.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use coracle_proto::{cri, shim};
use tracing::{info, warn};

use super::container_create::Origin;
use super::pod_checkpoint::{directory, no_options};
use super::sandbox_run::no_config;
use crate::checkpoint::{self, CheckpointError, CriuError, Manifest};
use crate::container::Container;
use crate::error::{Error, chain};
use crate::names::Claim;
use crate::records::RestoreRecord;
use crate::runtime::Runtime;
use crate::sandbox::{self, Sandbox};
use crate::shim_client::Shim;

/// What a pod that can be restored is made from.
#[derive(Debug)]
pub(super) struct Restoration {
    from: PathBuf,
    sandbox: cri::RunPodSandboxRequest,
    containers: Vec<(cri::ContainerConfig, Origin)>,
}

impl Runtime {
    /// Refuses what cannot be restored, and takes the name for the new sandbox.
    pub(super) async fn restoration(
        &self,
        request: cri::RestorePodRequest,
    ) -> Result<(Restoration, Claim), Error> {
        no_options(&request.options)?;
        let from = directory("checkpoint_path", &request.checkpoint_path)?;
        let config = request.config.ok_or_else(no_config)?;
        check_names(&request.container_configs)?;
        let manifest = read(from.clone(), &request.runtime_handler).await?;
        let fitting =
            checkpoint::fit(&manifest, &config, &request.container_configs).map_err(Error::Unfit)?;
        let mut containers = Vec::new();
        for (saved, wanted) in fitting {
            if self.image_of(wanted)?.id != saved.image_id {
                return Err(Error::Unfit(format!("container {:?}: the image differs", saved.name)));
            }
            let origin = Origin { archive: from.join(&saved.archive), restore: saved.restore.clone() };
            containers.push((wanted.clone(), origin));
        }
        checkpoint::program().map_err(|error| unable(&from, error))?;
        let sandbox =
            cri::RunPodSandboxRequest { config: Some(config), runtime_handler: request.runtime_handler };
        let claim = self.sandbox_claim(&sandbox).await?;
        Ok((Restoration { from, sandbox, containers }, claim))
    }

    /// Makes a pod, which has its name, from a checkpoint. A call that fails leaves nothing.
    pub(super) async fn pod_restore(
        self,
        restoration: Restoration,
        id: String,
    ) -> Result<cri::RestorePodResponse, Error> {
        let Restoration { from, sandbox, containers } = restoration;
        let metadata = sandbox.config.as_ref().and_then(|config| config.metadata.clone()).unwrap_or_default();
        self.new_sandbox(sandbox, id.clone(), true).await?;
        match self.restore_containers(&id, containers).await {
            Ok(restored_containers) => {
                info!(sandbox = id, from = %from.display(), "restored a pod");
                Ok(cri::RestorePodResponse { pod_sandbox_id: id, restored_containers })
            }
            Err(error) => {
                if let Err(error) = self.sandbox_unmake(id.clone()).await {
                    warn!(sandbox = id, error = error.chain(), "could not take a half-restored pod back");
                    self.inner.names.hold(sandbox::name(&metadata), id);
                }
                Err(error)
            }
        }
    }

    async fn restore_containers(
        &self,
        id: &str,
        containers: Vec<(cri::ContainerConfig, Origin)>,
    ) -> Result<Vec<cri::RestoredContainer>, Error> {
        let sandbox = self.inner.sandboxes.get(id).ok_or_else(|| Error::no_sandbox(id))?;
        let mut restored = Vec::new();
        for (config, origin) in containers {
            restored.push(self.restore_container(&sandbox, config, &origin).await?);
            coracle_fault::point("restore-pod.container");
        }
        // From here on it is a pod like others.
        self.inner.records.write_sandbox(&sandbox.record_now())?;
        Ok(restored)
    }

    async fn restore_container(
        &self,
        sandbox: &Sandbox,
        config: cri::ContainerConfig,
        origin: &Origin,
    ) -> Result<cri::RestoredContainer, Error> {
        let name = config.metadata.clone().unwrap_or_default().name;
        let mut claim = self.claim_container(sandbox, &config).await?;
        let container_id = claim.id().to_owned();
        self.new_container(sandbox, (container_id.clone(), config), Some(origin)).await?;
        claim.keep();
        Ok(cri::RestoredContainer { name, container_id })
    }

    /// What StartContainer does for a container with a checkpoint.
    pub(super) async fn restore_processes(
        &self,
        container: &Container,
        shim: &Shim,
        restore: &RestoreRecord,
    ) -> Result<(), Error> {
        let layer = self.inner.records.layer_dir(&container.id);
        let failed = |source| Error::Checkpoint { what: "container", id: container.id.clone(), source };
        let program = checkpoint::program().map_err(|error| failed(error.into()))?;
        let (images, work) = checkpoint::images_dir(&layer);
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let streams = restore.streams.iter();
        let call = shim::RestoreContainer {
            container_id: container.id.clone(),
            program: text(&program),
            images: text(&images),
            work: text(&work),
            external: restore.external.clone(),
            streams: streams
                .map(|(pipe, standard)| shim::Stream { pipe: pipe.clone(), standard: *standard })
                .collect(),
        };
        let pid = match shim.restore(call).await {
            Ok(pid) => pid,
            Err(source) => {
                let Some(said) = checkpoint::said(&layer) else {
                    return Err(Error::Shim { doing: "restore the container", source });
                };
                return Err(failed(CriuError::Failed(said).into()));
            }
        };
        container.restored(pid);
        let forgotten = tokio::task::spawn_blocking(move || checkpoint::forget_images(&layer)).await;
        if let Ok(Err(error)) = forgotten {
            warn!(container = container.id, error = chain(&error), "the images of a container stay with it");
        }
        Ok(())
    }
}

/// At least one container, each with a name of its own.
fn check_names(configs: &[cri::ContainerConfig]) -> Result<(), Error> {
    let invalid = |why: String| Err(Error::invalid("container_configs", why));
    if configs.is_empty() {
        return invalid("names no container".to_owned());
    }
    let mut seen = BTreeSet::new();
    for config in configs {
        let name = config.metadata.as_ref().map(|metadata| metadata.name.as_str()).unwrap_or_default();
        if name.is_empty() || !seen.insert(name) {
            return invalid(format!("{name:?} is no name, or named twice"));
        }
    }
    Ok(())
}

/// The manifest of a checkpoint whose archives are what it says.
async fn read(from: PathBuf, runtime_handler: &str) -> Result<Manifest, Error> {
    let work = tokio::task::spawn_blocking(move || {
        let manifest = checkpoint::read(&from)?;
        checkpoint::verify(&from, &manifest).map(|()| manifest)
    });
    let read = work.await.map_err(|panic| Error::Kernel {
        doing: "read the checkpoint",
        source: std::io::Error::other(panic),
    })?;
    let manifest = read.map_err(|error: CheckpointError| Error::invalid("checkpoint_path", chain(&error)))?;
    if manifest.runtime_handler != runtime_handler {
        return Err(Error::Unfit("the runtime handler differs".to_owned()));
    }
    Ok(manifest)
}

fn unable(from: &Path, error: CriuError) -> Error {
    Error::Checkpoint { what: "pod", id: from.to_string_lossy().into_owned(), source: error.into() }
}
