//! Calls to the signer, with timeouts and limits.

use std::{future::Future, path::PathBuf, time::Duration};

use hyper_util::rt::TokioIo;
use tonic::transport::{Channel, Endpoint};

use crate::{
    Error,
    keys::KeySet,
    v1::{self, external_jwt_signer_client::ExternalJwtSignerClient as Generated},
};

/// Maximum duration of a call.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of a response.
const MAX_RESPONSE: usize = 1 << 20;
/// Maximum bytes of a signature in base64url. The signature of an RSA key of 8,192 bits has 1,366.
const MAX_SIGNATURE: usize = 2 << 10;

#[derive(Clone)]
pub(crate) struct Client {
    endpoint: String,
    signer: Generated<Channel>,
}

impl Client {
    /// Creates a lazy connection. The first call connects, and so does the first call after a failure.
    pub(crate) fn new(endpoint: &str) -> Self {
        // An abstract address begins with a zero byte.
        let path = match endpoint.strip_prefix('@') {
            Some(name) => PathBuf::from(format!("\0{name}")),
            None => PathBuf::from(endpoint),
        };
        let connector = tower::service_fn(move |_: http::Uri| {
            let path = path.clone();
            async move { tokio::net::UnixStream::connect(path).await.map(TokioIo::new) }
        });
        // The name is not resolved: the connector ignores it.
        let channel = Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector);
        let signer = Generated::new(channel).max_decoding_message_size(MAX_RESPONSE);
        Self { endpoint: endpoint.to_owned(), signer }
    }

    /// Maximum validity of the signer's tokens, in seconds.
    pub(crate) async fn max_seconds(&self) -> Result<i64, Error> {
        let mut signer = self.signer.clone();
        let metadata = self.limited("Metadata", signer.metadata(v1::MetadataRequest {})).await?;
        Ok(metadata.max_token_expiration_seconds)
    }

    /// Header and signature of a token with these claims.
    pub(crate) async fn sign(&self, claims: String) -> Result<v1::SignJwtResponse, Error> {
        let mut signer = self.signer.clone();
        let signed = self.limited("Sign", signer.sign(v1::SignJwtRequest { claims })).await?;
        if signed.signature.is_empty() || signed.signature.len() > MAX_SIGNATURE {
            return Err(self.invalid("Sign", format!("a signature must have 1 to {MAX_SIGNATURE} bytes")));
        }
        Ok(signed)
    }

    /// The public keys.
    pub(crate) async fn keys(&self) -> Result<KeySet, Error> {
        let mut signer = self.signer.clone();
        let fetched = self.limited("FetchKeys", signer.fetch_keys(v1::FetchKeysRequest {})).await?;
        KeySet::new(fetched).map_err(|reason| self.invalid("FetchKeys", reason))
    }

    pub(crate) fn invalid(&self, call: &'static str, reason: String) -> Error {
        Error::Response { call, endpoint: self.endpoint.clone(), reason }
    }

    /// Waits for the response to a call, at most [`TIMEOUT`].
    async fn limited<T>(
        &self,
        call: &'static str,
        response: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    ) -> Result<T, Error> {
        let failed = |reason| Error::Call { call, endpoint: self.endpoint.clone(), reason };
        let response = tokio::time::timeout(TIMEOUT, response).await;
        let response = response.map_err(|_elapsed| failed(format!("no response within {TIMEOUT:?}")))?;
        response.map(tonic::Response::into_inner).map_err(|status| {
            let message: String = status.message().chars().take(200).collect();
            failed(format!("{}: {message}", status.code()))
        })
    }
}
