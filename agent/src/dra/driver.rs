//! Calls of drivers, over a gRPC connection to the driver's socket.
//!
//! A driver is untrusted: an answer has limits on size and time, and is refused as a whole if a part is invalid.

use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::task::{Context, Poll};
use std::time::Duration;

use coracle_events::{MESSAGE_MAX, printable};
use coracle_proto::dra;
use coracle_proto::dra::dra_plugin_client::DraPluginClient;
use futures::FutureExt;
use futures::future::BoxFuture;
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::UnixStream;
use tokio_util::task::AbortOnDropHandle;
use tonic::body::Body;
use tonic::{Code, Status};

use super::record::Device;

/// Timeout of a call, as in the kubelet (`defaultClientCallTimeout`).
const CALL_TIMEOUT: Duration = Duration::from_secs(45);
/// Maximum bytes of an answer.
pub(super) const ANSWER_MAX: usize = 1 << 20;
/// Maximum bytes of the headers of an answer.
const HEADERS_MAX: u32 = 16 << 10;
/// Maximum devices in an answer. A claim has at most 32 results.
const DEVICES_MAX: usize = 256;
/// Maximum CDI ids and request names in an answer.
const NAMES_MAX: usize = 4096;
/// Maximum bytes of a name.
pub(super) const NAME_MAX: usize = 512;

/// The reason why a call of a driver failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DriverError {
    #[error("{call}: the driver did not answer within {} seconds", CALL_TIMEOUT.as_secs())]
    Late { call: &'static str },
    #[error("{call}: {code:?}: {message}")]
    Status { call: &'static str, code: Code, message: String },
    #[error("{call} failed for ResourceClaim {claim}: {message}")]
    Failed { call: &'static str, claim: String, message: String },
    #[error("{call} skipped ResourceClaim {claim}")]
    Skipped { call: &'static str, claim: String },
    #[error("{call} returned a result for another claim than ResourceClaim {claim}")]
    OtherClaim { call: &'static str, claim: String },
    #[error("{call} returned invalid devices for ResourceClaim {claim}: {problem}")]
    Devices { call: &'static str, claim: String, problem: &'static str },
}

/// Version of a driver's service. Both versions have the same messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    V1,
    V1Beta1,
}

/// An open connection. It is closed when this value is dropped.
pub(crate) struct Link {
    sender: SendRequest<Body>,
    running: AbortOnDropHandle<()>,
}

/// Sends requests on a connection. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    sender: SendRequest<Body>,
    version: Version,
}

// === impl Version ===

impl Version {
    /// The newest version in the list of a driver's services.
    pub(super) fn newest(services: &[String]) -> Option<Self> {
        let has = |name: &str| services.iter().any(|service| service == name);
        match () {
            () if has("v1.DRAPlugin") => Some(Self::V1),
            () if has("v1beta1.DRAPlugin") => Some(Self::V1Beta1),
            () => None,
        }
    }
}

// === impl Link ===

impl Link {
    /// Connects to an opened socket (`O_PATH`).
    pub(crate) async fn open(socket: &OwnedFd) -> io::Result<Self> {
        // Connects to the opened file itself: its name may refer to another file by now.
        let stream = UnixStream::connect(format!("/proc/self/fd/{}", socket.as_raw_fd())).await?;
        let mut connecting = http2::Builder::new(TokioExecutor::new());
        connecting.max_header_list_size(HEADERS_MAX);
        let (sender, connection): (SendRequest<Body>, _) =
            connecting.handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        let running = async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "the connection to a plugin failed");
            }
        };
        Ok(Self { sender, running: AbortOnDropHandle::new(coracle_threads::spawn(running)) })
    }

    /// A sender of requests.
    pub(crate) fn caller(&self, version: Version) -> Caller {
        Caller { sender: self.sender.clone(), version }
    }

    /// Waits until the peer closes the connection.
    pub(crate) async fn closed(&mut self) {
        let _ended = (&mut self.running).await;
    }
}

// === impl Caller ===

impl tower::Service<Request<Body>> for Caller {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = BoxFuture<'static, Result<Self::Response, hyper::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.sender.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if self.version == Version::V1Beta1
            && let Some(uri) = beta_path(request.uri())
        {
            *request.uri_mut() = uri;
        }
        let mut sender = self.sender.clone();
        async move { sender.send_request(request).await }.boxed()
    }
}

impl Caller {
    /// Prepares a claim. Returns the devices of the claim.
    pub(super) async fn prepare(&self, claim: dra::Claim) -> Result<Vec<Device>, DriverError> {
        const CALL: &str = "NodePrepareResources";
        let (name, uid) = (claim.name.clone(), claim.uid.clone());
        let mut client = self.client();
        let request = dra::NodePrepareResourcesRequest { claims: vec![claim] };
        let mut answer = within(CALL, client.node_prepare_resources(request)).await?.claims;
        let result = answer.remove(&uid);
        let Some(result) = result else { return Err(missing(CALL, name, answer.is_empty())) };
        if !answer.is_empty() {
            return Err(DriverError::OtherClaim { call: CALL, claim: name });
        }
        failed(CALL, &name, &result.error)?;
        match checked(result.devices) {
            Ok(devices) => Ok(devices),
            Err(problem) => Err(DriverError::Devices { call: CALL, claim: name, problem }),
        }
    }

    /// Reverts the preparation of a claim.
    pub(super) async fn unprepare(&self, claim: dra::Claim) -> Result<(), DriverError> {
        const CALL: &str = "NodeUnprepareResources";
        let (name, uid) = (claim.name.clone(), claim.uid.clone());
        let mut client = self.client();
        let request = dra::NodeUnprepareResourcesRequest { claims: vec![claim] };
        let mut answer = within(CALL, client.node_unprepare_resources(request)).await?.claims;
        match answer.remove(&uid) {
            Some(result) => failed(CALL, &name, &result.error),
            None => Err(missing(CALL, name, answer.is_empty())),
        }
    }

    fn client(&self) -> DraPluginClient<Self> {
        DraPluginClient::with_origin(self.clone(), origin()).max_decoding_message_size(ANSWER_MAX)
    }
}

/// Placeholders for the scheme and host of requests: a unix socket has neither.
pub(crate) fn origin() -> Uri {
    Uri::from_static("http://localhost")
}

/// The URI with the service of the version v1beta1.
fn beta_path(uri: &Uri) -> Option<Uri> {
    let path = uri.path().replacen(".dra.v1.DRAPlugin/", ".dra.v1beta1.DRAPlugin/", 1);
    Uri::builder().scheme("http").authority("localhost").path_and_query(path).build().ok()
}

async fn within<T>(
    call: &'static str,
    answer: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, DriverError> {
    match tokio::time::timeout(CALL_TIMEOUT, answer).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => {
            let message = printable(status.message(), MESSAGE_MAX / 2);
            Err(DriverError::Status { call, code: status.code(), message })
        }
        Err(_elapsed) => Err(DriverError::Late { call }),
    }
}

fn missing(call: &'static str, claim: String, is_empty: bool) -> DriverError {
    if is_empty { DriverError::Skipped { call, claim } } else { DriverError::OtherClaim { call, claim } }
}

fn failed(call: &'static str, claim: &str, error: &str) -> Result<(), DriverError> {
    if error.is_empty() {
        return Ok(());
    }
    let message = printable(error, MESSAGE_MAX / 2);
    Err(DriverError::Failed { call, claim: claim.to_owned(), message })
}

/// Checks the devices of an answer.
fn checked(devices: Vec<dra::Device>) -> Result<Vec<Device>, &'static str> {
    if devices.len() > DEVICES_MAX {
        return Err("too many devices");
    }
    let names = devices.iter().map(|device| device.cdi_device_ids.len() + device.request_names.len());
    if names.sum::<usize>() > NAMES_MAX {
        return Err("too many names");
    }
    let is_valid =
        |name: &String| !name.is_empty() && name.len() <= NAME_MAX && !name.contains(char::is_control);
    devices
        .into_iter()
        .map(|device| {
            let places = [&device.pool_name, &device.device_name].into_iter();
            let are_valid = places.chain(&device.cdi_device_ids).chain(&device.request_names).all(is_valid);
            if !are_valid {
                return Err("a name is empty, too long or has control characters");
            }
            Ok(Device {
                requests: device.request_names,
                pool: device.pool_name,
                device: device.device_name,
                cdi: device.cdi_device_ids,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_of_a_driver_is_used() {
        let newest = |services: &[&str]| {
            Version::newest(&services.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(newest(&["v1beta1.DRAPlugin", "v1.DRAPlugin"]), Some(Version::V1));
        assert_eq!(newest(&["v1beta1.DRAPlugin"]), Some(Version::V1Beta1));
        assert_eq!(newest(&["v1alpha4.Node"]), None);
        let uri =
            "http://localhost/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources".parse().unwrap();
        let beta = beta_path(&uri).unwrap();
        assert_eq!(beta.path(), "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources");
    }

    #[test]
    fn devices_are_limited_and_have_names() {
        let device = |cdi: &str| dra::Device {
            request_names: Vec::new(),
            pool_name: "p".to_owned(),
            device_name: "d".to_owned(),
            cdi_device_ids: vec![cdi.to_owned()],
        };
        assert_eq!(checked(vec![device("v/c=x")]).unwrap()[0].cdi, ["v/c=x"]);
        for bad in ["", "a\nb", &"x".repeat(NAME_MAX + 1)] {
            assert!(checked(vec![device(bad)]).is_err(), "{bad:?}");
        }
        assert!(checked(vec![device("x"); DEVICES_MAX + 1]).is_err());
        let mut many = device("x");
        many.cdi_device_ids = vec!["x".to_owned(); NAMES_MAX + 1];
        assert!(checked(vec![many]).is_err());
    }
}
