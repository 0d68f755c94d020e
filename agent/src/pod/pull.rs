//! Image pulls for containers, by their pull policy and with the pod's credentials. The image store runs one pull of a
//! reference at a time; further pulls wait for it. The node's settings may limit concurrent pulls.

mod provider;
pub(crate) mod records;
mod secret;

use std::sync::Arc;

use coracle_images::Reference;
use coracle_proto::cri;
use futures::future::{BoxFuture, FutureExt, Shared};
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::jiff::Timestamp;
use tokio::task::JoinHandle;
use tokio_util::task::AbortOnDropHandle;

use super::NodeContext;
use super::security::ImageUser;
use super::state::{Failed, Waiting};
use crate::event_recorder::{ContainerRef, Level};
use crate::runtime::RuntimeError;
use records::{Check, ImageRequest, UsedSecret};
use secret::Credential;

pub use provider::ProviderError;
pub(crate) use provider::Providers;

/// An image in the store.
#[derive(Clone, Debug)]
pub(crate) struct Present {
    pub(crate) id: String,
    pub(crate) user: ImageUser,
}

/// The reason why an image is not available. `waiting.reason` is shown in the container's status.
#[derive(Clone, Debug)]
pub(crate) struct Missing {
    pub(crate) waiting: Waiting,
    /// The failed operation: a pull, which has a back-off by image, or another operation.
    pub(crate) failed: Failed,
}

/// A running pull. It is cancelled when all clones are dropped.
pub(crate) type PullTask = Shared<BoxFuture<'static, Result<Present, Missing>>>;

/// Starts a task that makes the image of a container available.
pub(crate) fn begin(node: &Arc<NodeContext>, pod: &Arc<Pod>, container: &Container) -> PullTask {
    let (node, pod, container) = (Arc::clone(node), Arc::clone(pod), container.clone());
    shared(tokio::spawn(async move { ensure(&node, &pod, &container, None).await }))
}

/// The result of a task, which is aborted when all clones are dropped.
pub(crate) fn shared(task: JoinHandle<Result<Present, Missing>>) -> PullTask {
    let task = AbortOnDropHandle::new(task);
    let result = async move {
        task.await.unwrap_or_else(|error| {
            let waiting = Waiting { reason: "ErrImagePull".to_owned(), message: error.to_string() };
            Err(Missing { waiting, failed: Failed::Start })
        })
    };
    result.boxed().shared()
}

/// Makes the image of a container available.
pub(crate) async fn ensure(
    node: &NodeContext,
    pod: &Pod,
    container: &Container,
    sandbox: Option<&cri::PodSandboxConfig>,
) -> Result<Present, Missing> {
    let image = container.image.as_deref().unwrap_or_default();
    let about = Subject { node, pod, container, image };
    let reference = Reference::parse(image).map_err(|error| about.invalid(&error))?;
    let spec = about.spec();
    let policy = policy(container, &reference);
    if policy != Policy::Always {
        let found = status(node, &spec).await.map_err(|status| about.inspect_failed(&status))?;
        if let Some(found) = found
            && about.may_use(&reference, &found).await
        {
            let message = format!(
                "Container image \"{image}\" already present on machine and can be accessed by the pod"
            );
            about.event(Level::Normal, "Pulled", message);
            return Ok(Present::from(found));
        }
        // An image that the pod is not permitted to use counts as absent.
        if policy == Policy::Never {
            return Err(about.never_pulled());
        }
    }
    about.pull(&reference, sandbox).await
}

async fn status(node: &NodeContext, spec: &cri::ImageSpec) -> Result<Option<cri::Image>, RuntimeError> {
    let request = cri::ImageStatusRequest { image: Some(spec.clone()), verbose: false };
    Ok(node.runtime.image_status(request).await?.image)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Policy {
    Always,
    IfNotPresent,
    Never,
}

fn policy(container: &Container, reference: &Reference) -> Policy {
    match container.image_pull_policy.as_deref() {
        Some("Always") => Policy::Always,
        Some("Never") => Policy::Never,
        Some(_) => Policy::IfNotPresent,
        // Without a policy, the API server's defaults apply.
        None if reference.to_string().ends_with(":latest") => Policy::Always,
        None => Policy::IfNotPresent,
    }
}

/// Whether a pull failed because the disk is full. The built-in runtime has an error variant for this. For other
/// runtimes the function reads the message.
fn is_disk_full(error: &RuntimeError) -> bool {
    let text = error.message().to_lowercase();
    matches!(error, RuntimeError::Exhausted(_)) || text.contains("no space left on device")
}

impl From<cri::Image> for Present {
    fn from(image: cri::Image) -> Self {
        Self { user: ImageUser { uid: image.uid.map(|uid| uid.value), name: image.username }, id: image.id }
    }
}

/// A container whose image is made available.
struct Subject<'a> {
    node: &'a NodeContext,
    pod: &'a Pod,
    container: &'a Container,
    image: &'a str,
}

impl Subject<'_> {
    fn spec(&self) -> cri::ImageSpec {
        cri::ImageSpec {
            image: self.image.to_owned(),
            user_specified_image: self.image.to_owned(),
            ..cri::ImageSpec::default()
        }
    }

    fn event(&self, level: Level, reason: &'static str, message: String) {
        self.node.recorder.container(
            ContainerRef { pod: self.pod, name: &self.container.name },
            level,
            reason,
            message,
        );
    }

    fn missing(&self, reason: &str, message: String) -> Missing {
        let failed = match reason {
            "InvalidImageName" | "ErrImageNeverPull" | "ImageInspectError" => Failed::Start,
            _ => Failed::Pull { image: self.image.to_owned() },
        };
        Missing { waiting: Waiting { reason: reason.to_owned(), message }, failed }
    }

    fn invalid(&self, error: &dyn std::error::Error) -> Missing {
        let message = format!(
            "Failed to apply default image tag \"{}\": couldn't parse image name: {error}",
            self.image
        );
        self.event(Level::Warning, "InspectFailed", message.clone());
        self.event(Level::Warning, "Failed", "Error: InvalidImageName".to_owned());
        self.missing("InvalidImageName", message)
    }

    fn inspect_failed(&self, error: &RuntimeError) -> Missing {
        let message = format!("Failed to inspect image \"{}\": {}", self.image, error.message());
        self.event(Level::Warning, "InspectFailed", message.clone());
        self.missing("ImageInspectError", message)
    }

    fn never_pulled(&self) -> Missing {
        let message = format!("Container image \"{}\" is not present with pull policy of Never", self.image);
        self.event(Level::Warning, "ErrImageNeverPull", message.clone());
        self.event(Level::Warning, "Failed", "Error: ErrImageNeverPull".to_owned());
        self.missing("ErrImageNeverPull", message)
    }

    fn not_recorded(&self, error: &std::io::Error) -> Missing {
        if error.kind() == std::io::ErrorKind::StorageFull {
            self.node.image_gc.no_room();
        }
        let message =
            format!("Failed to record image pull intent for container image \"{}\": {error}", self.image);
        self.event(Level::Warning, "Failed", format!("Error: {message}"));
        self.missing("ErrImagePull", message)
    }

    /// Whether the pod may use an image of the store without a pull.
    async fn may_use(&self, reference: &Reference, found: &cri::Image) -> bool {
        let records = &self.node.pull_records;
        records.settle(&*self.node.runtime).await;
        let names = [found.repo_tags.as_slice(), found.repo_digests.as_slice()].concat();
        match records.check(ImageRequest { image: self.image, reference, id: &found.id, names: &names }) {
            Check::Allowed => true,
            Check::Refused => false,
            Check::Secrets(known) => {
                let own = secret::of_pod(self.node, self.pod, reference).await;
                own.iter().filter_map(|own| own.secret.as_ref()).any(|secret| known.contains(secret))
            }
        }
    }

    /// Tries the credentials one after another. Returns the last result, and the secret that was used.
    async fn request_pull(
        &self,
        credentials: Vec<Credential>,
        sandbox: Option<&cri::PodSandboxConfig>,
    ) -> (Result<cri::PullImageResponse, RuntimeError>, Option<UsedSecret>) {
        let mut credentials = credentials.into_iter();
        loop {
            let (auth, secret) = credentials.next().map(|next| (next.auth, next.secret)).unzip();
            let last = credentials.len() == 0;
            let request =
                cri::PullImageRequest { image: Some(self.spec()), auth, sandbox_config: sandbox.cloned() };
            let pulled = self.node.runtime.pull_image(request).await;
            if pulled.is_ok() || last {
                return (pulled, secret.flatten());
            }
        }
    }

    async fn pull(
        &self,
        reference: &Reference,
        sandbox: Option<&cri::PodSandboxConfig>,
    ) -> Result<Present, Missing> {
        self.event(Level::Normal, "Pulling", format!("Pulling image \"{}\"", self.image));
        let requested = Timestamp::now();
        let uid = self.pod.metadata.uid.as_deref().unwrap_or_default();
        // As upstream, the pull time includes the wait for other pulls.
        let _running = self.node.metrics.pull_times.begin(uid);
        // The credentials are read before the pull takes a slot: a credential plugin that does not respond must not
        // delay pulls of other pods.
        let credentials = secret::credentials(self.node, self.pod, reference).await;
        let policy = &self.node.config.pod_policy;
        let _slot = policy.pull_slots.take().await;
        if !policy.pull_rate.allows() {
            return Err(self.pull_failed(&RuntimeError::Unavailable("pull QPS exceeded".to_owned())));
        }
        let began = Timestamp::now();
        let _active = self.node.pulls.begin();
        let records = &self.node.pull_records;
        records.settle(&*self.node.runtime).await;
        let begun = records.begin(&self.node.runtime, &reference.to_string());
        let begun = begun.map_err(|error| self.not_recorded(&error))?;
        let (pulled, secret) = self.request_pull(credentials, sandbox).await;
        let id = match pulled {
            Ok(response) => response.image_ref,
            Err(status) => {
                begun.failed();
                if is_disk_full(&status) {
                    self.node.image_gc.no_room();
                }
                return Err(self.pull_failed(&status));
            }
        };
        self.node.image_gc.check_disk();
        let spec = cri::ImageSpec { image: id, ..self.spec() };
        let Some(image) = status(self.node, &spec).await.ok().flatten() else {
            return Err(
                self.pull_failed(&RuntimeError::NotFound("the pulled image is not in the store".to_owned()))
            );
        };
        records.pulled(begun, &image.id, &reference.repository(), secret).await;
        let took = std::time::Duration::try_from(Timestamp::now() - began).unwrap_or_default();
        self.node.metrics.pulled(image.size, took);
        let with_wait = std::time::Duration::try_from(Timestamp::now() - requested).unwrap_or(took);
        self.event(
            Level::Normal,
            "Pulled",
            format!(
                "Successfully pulled image \"{}\" in {took:?} ({with_wait:?} including waiting). Image size: {} \
                 bytes.",
                self.image, image.size
            ),
        );
        Ok(Present::from(image))
    }

    fn pull_failed(&self, error: &RuntimeError) -> Missing {
        let text = error.message();
        let reason = ["RegistryUnavailable", "SignatureValidationFailed"]
            .into_iter()
            .find(|reason| text.contains(reason))
            .unwrap_or("ErrImagePull");
        self.event(Level::Warning, "Failed", format!("Failed to pull image \"{}\": {text}", self.image));
        self.event(Level::Warning, "Failed", format!("Error: {reason}"));
        self.missing(reason, text.to_owned())
    }
}
