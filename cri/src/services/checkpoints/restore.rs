//! RestorePod: creates a sandbox and its containers from a checkpoint. StartContainer then restores the processes.
//!
//! Everything except the processes is created as by RunPodSandbox and CreateContainer. The whole request is validated before
//! anything is created. The sandbox's name is claimed as by RunPodSandbox, because the CRI requires neither call to be
//! idempotent.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use coracle_proto::cri;
use tracing::{info, warn};

use super::CheckpointService;
use super::pod::{directory, no_options};
use crate::checkpoint::{self, Manifest};
use crate::error::checkpoint::{CheckpointError, CriuError};
use crate::error::{Error, chain};
use crate::names::Claim;
use crate::sandbox::{self, Sandbox};
use crate::services::containers::{ContainerRequest, Origin};

/// A validated request to restore a pod.
#[derive(Debug)]
pub(crate) struct Restoration {
    from: PathBuf,
    sandbox: cri::RunPodSandboxRequest,
    containers: Vec<ContainerRestoration>,
}

/// A container to restore.
#[derive(Debug)]
struct ContainerRestoration {
    /// The requested configuration.
    config: cri::ContainerConfig,
    /// The archive of the saved container.
    origin: Origin,
}

impl CheckpointService {
    /// Validates the request and claims the name of the new sandbox.
    pub(crate) async fn restoration(
        &self,
        request: cri::RestorePodRequest,
    ) -> Result<(Restoration, Claim), Error> {
        no_options(&request.options)?;
        let from = directory("checkpoint_path", &request.checkpoint_path)?;
        let config = request.config.ok_or_else(Error::no_config)?;
        check_names(&request.container_configs)?;
        let manifest = read(from.clone(), &request.runtime_handler).await?;
        let fitting =
            checkpoint::fit(&manifest, &config, &request.container_configs).map_err(Error::Unfit)?;
        let mut containers = Vec::new();
        for (saved, requested) in fitting {
            if self.containers.image_of(requested)?.id != saved.image_id {
                return Err(Error::Unfit(format!("container {:?}: the image differs", saved.name)));
            }
            let origin = Origin { archive: from.join(&saved.archive), restore: saved.restore.clone() };
            containers.push(ContainerRestoration { config: requested.clone(), origin });
        }
        checkpoint::program().map_err(|error| unable(&from, error))?;
        let sandbox =
            cri::RunPodSandboxRequest { config: Some(config), runtime_handler: request.runtime_handler };
        let claim = self.sandboxes.sandbox_claim(&sandbox).await?;
        Ok((Restoration { from, sandbox, containers }, claim))
    }

    /// Restores a pod whose name is claimed for this id. A failure undoes all steps.
    pub(crate) async fn pod_restore(
        self,
        restoration: Restoration,
        id: String,
    ) -> Result<cri::RestorePodResponse, Error> {
        let Restoration { from, sandbox, containers } = restoration;
        let metadata = sandbox.config.as_ref().and_then(|config| config.metadata.clone()).unwrap_or_default();
        self.sandboxes.run_or_undo(sandbox, id.clone(), true).await?;
        match self.restore_containers(&id, containers).await {
            Ok(restored_containers) => {
                info!(sandbox = id, from = %from.display(), "restored a pod");
                Ok(cri::RestorePodResponse { pod_sandbox_id: id, restored_containers })
            }
            Err(error) => {
                if let Err(error) = self.sandboxes.undo_run(id.clone()).await {
                    warn!(sandbox = id, error = error.chain(), "cannot remove an incompletely restored pod");
                    self.names.hold(sandbox::name(&metadata), id);
                }
                Err(error)
            }
        }
    }

    async fn restore_containers(
        &self,
        id: &str,
        containers: Vec<ContainerRestoration>,
    ) -> Result<Vec<cri::RestoredContainer>, Error> {
        let sandbox = self.tables.sandbox(id)?;
        let mut restored = Vec::new();
        for ContainerRestoration { config, origin } in containers {
            restored.push(self.restore_container(&sandbox, config, origin).await?);
            coracle_fault::point("restore-pod.container");
        }
        // The new record does not say `restoring`, so that the pod is kept when the runtime restarts. The guard ensures
        // that this record does not replace the record of a stopped sandbox, and is not left after the removal of the
        // sandbox.
        let _guard = sandbox.ending.lock().await;
        sandbox.shim()?;
        self.records.write_sandbox(&sandbox.record_now())?;
        Ok(restored)
    }

    async fn restore_container(
        &self,
        sandbox: &Sandbox,
        config: cri::ContainerConfig,
        origin: Origin,
    ) -> Result<cri::RestoredContainer, Error> {
        let name = config.metadata.clone().unwrap_or_default().name;
        let mut claim = self.containers.claim_name(sandbox, &config).await?;
        let container_id = claim.id().to_owned();
        let request = ContainerRequest { id: container_id.clone(), config, origin: Some(origin) };
        self.containers.create_or_undo(sandbox, request).await?;
        claim.keep();
        Ok(cri::RestoredContainer { name, container_id })
    }
}

/// Refuses an empty list, and containers without a unique name.
fn check_names(configs: &[cri::ContainerConfig]) -> Result<(), Error> {
    let invalid = |why: String| Err(Error::invalid("container_configs", why));
    if configs.is_empty() {
        return invalid("is empty".to_owned());
    }
    let mut seen = BTreeSet::new();
    for config in configs {
        let name = config.metadata.as_ref().map(|metadata| metadata.name.as_str()).unwrap_or_default();
        if name.is_empty() || !seen.insert(name) {
            return invalid(format!("name {name:?} is empty or used twice"));
        }
    }
    Ok(())
}

/// Reads the manifest of a checkpoint and verifies the archives.
async fn read(from: PathBuf, runtime_handler: &str) -> Result<Manifest, Error> {
    let work = coracle_threads::spawn_blocking(move || {
        let manifest = checkpoint::read(&from)?;
        checkpoint::verify(&from, &manifest).map(|()| manifest)
    });
    let read = work.await.map_err(Error::panicked("read the checkpoint"))?;
    let manifest = read.map_err(|error: CheckpointError| Error::invalid("checkpoint_path", chain(&error)))?;
    if manifest.runtime_handler != runtime_handler {
        return Err(Error::Unfit("the runtime handler differs".to_owned()));
    }
    Ok(manifest)
}

fn unable(from: &Path, error: CriuError) -> Error {
    Error::Checkpoint { what: "pod", id: from.to_string_lossy().into_owned(), source: error.into() }
}
