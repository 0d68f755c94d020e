//! Calls to the plugin. The plugin is not trusted: the duration of each call and the size of each response are limited.

use std::{future::Future, path::PathBuf};

use hyper_util::rt::TokioIo;
use tonic::transport::{Channel, Endpoint};

use super::{
    KmsSettings, MAX_ANNOTATIONS, MAX_KEY_ID, MAX_SOURCE,
    v2::{self, key_management_service_client::KeyManagementServiceClient as Generated},
};

/// Maximum bytes of a response.
const MAX_RESPONSE: usize = 64 << 10;

#[derive(Clone)]
pub(super) struct Client {
    settings: KmsSettings,
    plugin: Generated<Channel>,
}

impl Client {
    /// Creates a client, which connects with the first call. Must be called within a runtime.
    pub(super) fn new(settings: KmsSettings) -> Self {
        let plugin = connect(settings.socket.clone());
        Self { settings, plugin }
    }

    /// The plugin's name in the configuration.
    pub(super) fn name(&self) -> &str {
        &self.settings.name
    }

    /// The id of the plugin's current key.
    pub(super) async fn status(&self) -> Result<String, String> {
        let mut plugin = self.plugin.clone();
        let status = self.limited(plugin.status(v2::StatusRequest {})).await?;
        if status.healthz != "ok" {
            return Err(format!("it is not healthy: {:.200}", status.healthz));
        }
        if !matches!(status.version.as_str(), "v2" | "v2beta1") {
            return Err(format!("its version {:.20?} is not v2", status.version));
        }
        check_key_id(&status.key_id)?;
        Ok(status.key_id)
    }

    pub(super) async fn encrypt(&self, plaintext: Vec<u8>) -> Result<v2::EncryptResponse, String> {
        let mut plugin = self.plugin.clone();
        let request = v2::EncryptRequest { plaintext, uid: uid()? };
        let response = self.limited(plugin.encrypt(request)).await?;
        check_key_id(&response.key_id)?;
        if response.ciphertext.is_empty() || response.ciphertext.len() > MAX_SOURCE {
            return Err(format!("the encrypted key must have 1 to {MAX_SOURCE} bytes"));
        }
        let size: usize = response.annotations.iter().map(|(key, value)| key.len() + value.len()).sum();
        if size > MAX_ANNOTATIONS {
            return Err(format!("the annotations have more than {MAX_ANNOTATIONS} bytes"));
        }
        Ok(response)
    }

    pub(super) async fn decrypt(&self, mut request: v2::DecryptRequest) -> Result<Vec<u8>, String> {
        let mut plugin = self.plugin.clone();
        request.uid = uid()?;
        Ok(self.limited(plugin.decrypt(request)).await?.plaintext)
    }

    /// Ends a call at the configured timeout.
    async fn limited<T>(
        &self,
        call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    ) -> Result<T, String> {
        let result = tokio::time::timeout(self.settings.timeout, call).await;
        let result = result.map_err(|_elapsed| format!("no response within {:?}", self.settings.timeout))?;
        result.map(tonic::Response::into_inner).map_err(|status| {
            let message: String = status.message().chars().take(200).collect();
            format!("{}: {message}", status.code())
        })
    }
}

/// A lazy connection: it connects with the first call, and again after a failure.
fn connect(socket: PathBuf) -> Generated<Channel> {
    // The name is not resolved: the connector ignores it.
    let endpoint = Endpoint::from_static("http://localhost");
    let connector = tower::service_fn(move |_: http::Uri| {
        let socket = socket.clone();
        async move { tokio::net::UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Generated::new(endpoint.connect_with_connector_lazy(connector)).max_decoding_message_size(MAX_RESPONSE)
}

fn check_key_id(id: &str) -> Result<(), String> {
    match id.is_empty() || id.len() > MAX_KEY_ID {
        true => Err(format!("the id of its key must have 1 to {MAX_KEY_ID} bytes")),
        false => Ok(()),
    }
}

fn uid() -> Result<String, String> {
    let bytes: [u8; 16] = super::random().map_err(|error| error.to_string())?;
    Ok(hex::encode(bytes))
}
