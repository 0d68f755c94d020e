//! The channels to etcd's members. If the TLS files have changed when a connection fails, the channels are made again.
//! So renewed certificates take effect without a restart.

use std::{
    path::Path,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, Instant},
};

use coracle_error_chain::chain;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use super::{EtcdIdentity, EtcdTls};
use crate::Error;

/// Timeout of an attempt to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Interval of pings, which detect a member behind a broken network.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum time for the response to a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum time between two readings of the TLS files.
const RELOAD_INTERVAL: Duration = Duration::from_secs(1);

/// The channels to etcd's members, in the order of the setting.
pub(super) struct Channels {
    servers: Vec<String>,
    tls: Option<EtcdTls>,
    open: RwLock<Open>,
    /// Time of the last reading of the TLS files.
    read_at: Mutex<Instant>,
}

/// Channels, and the TLS files with which they were made.
struct Open {
    files: Option<TlsFiles>,
    channels: Arc<[Channel]>,
}

/// The content of the TLS files.
#[derive(PartialEq, Eq)]
struct TlsFiles {
    authority: Vec<u8>,
    identity: Option<IdentityFiles>,
}

/// The content of the files of a client certificate.
#[derive(PartialEq, Eq)]
struct IdentityFiles {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

// === impl Channels ===

impl Channels {
    pub(super) fn new(servers: &[String], tls: Option<&EtcdTls>) -> Result<Self, Error> {
        let open = Open::new(servers, tls.map(TlsFiles::read).transpose()?)?;
        Ok(Self {
            servers: servers.to_vec(),
            tls: tls.cloned(),
            open: RwLock::new(open),
            read_at: Mutex::new(Instant::now()),
        })
    }

    /// The URLs of the members, in the order of the channels.
    pub(super) fn servers(&self) -> &[String] {
        &self.servers
    }

    pub(super) fn all(&self) -> Arc<[Channel]> {
        self.open.read().unwrap_or_else(PoisonError::into_inner).channels.clone()
    }

    /// Makes the channels again if the TLS files have changed. Must be called after a failed connection.
    pub(super) fn reload_if_due(&self) {
        if self.tls.is_none() || !self.is_due() {
            return;
        }
        match self.reload() {
            Ok(false) => {}
            Ok(true) => tracing::info!("the TLS files for etcd have changed"),
            Err(error) => {
                tracing::warn!(%error, "cannot use the TLS files for etcd, keeping the former ones")
            }
        }
    }

    /// Whether the files may be read again. They are read at most once in [`RELOAD_INTERVAL`], because many requests
    /// fail while etcd does not respond.
    fn is_due(&self) -> bool {
        let mut read_at = self.read_at.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = read_at.elapsed() >= RELOAD_INTERVAL;
        if is_due {
            *read_at = Instant::now();
        }
        is_due
    }

    /// Makes the channels again if the TLS files have changed. Returns whether the files have changed.
    fn reload(&self) -> Result<bool, Error> {
        let Some(tls) = &self.tls else { return Ok(false) };
        let files = Some(TlsFiles::read(tls)?);
        let is_same = self.open.read().unwrap_or_else(PoisonError::into_inner).files == files;
        if !is_same {
            let open = Open::new(&self.servers, files)?;
            *self.open.write().unwrap_or_else(PoisonError::into_inner) = open;
        }
        Ok(!is_same)
    }
}

// === impl Open ===

impl Open {
    fn new(servers: &[String], files: Option<TlsFiles>) -> Result<Self, Error> {
        let tls = files.as_ref().map(TlsFiles::config);
        let channels = servers.iter().map(|server| channel(server, tls.as_ref()));
        let channels = channels.collect::<Result<Vec<_>, _>>()?;
        if channels.is_empty() {
            return Err(Error::Endpoint { what: "servers".to_owned(), detail: "none are given".to_owned() });
        }
        Ok(Self { files, channels: channels.into() })
    }
}

// === impl TlsFiles ===

impl TlsFiles {
    fn read(tls: &EtcdTls) -> Result<Self, Error> {
        let read = |path: &Path| {
            std::fs::read(path).map_err(|error| Error::Endpoint {
                what: format!("file {}", path.display()),
                detail: error.to_string(),
            })
        };
        let identity = |files: &EtcdIdentity| -> Result<IdentityFiles, Error> {
            Ok(IdentityFiles { certificate: read(&files.certificate)?, key: read(&files.key)? })
        };
        Ok(Self {
            authority: read(&tls.authority)?,
            identity: tls.identity.as_ref().map(identity).transpose()?,
        })
    }

    fn config(&self) -> ClientTlsConfig {
        let config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&self.authority));
        match &self.identity {
            Some(files) => config.identity(Identity::from_pem(&files.certificate, &files.key)),
            None => config,
        }
    }
}

/// A connection that is established at its first use, and again after a failure.
fn channel(server: &str, tls: Option<&ClientTlsConfig>) -> Result<Channel, Error> {
    let failed = |error: &tonic::transport::Error| Error::Endpoint {
        what: format!("server {server}"),
        detail: chain(error),
    };
    let endpoint = Endpoint::from_shared(server.to_owned()).map_err(|error| failed(&error))?;
    let endpoint = endpoint
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    let is_tls = endpoint.uri().scheme_str() == Some("https");
    let endpoint = match tls {
        Some(tls) if is_tls => endpoint.tls_config(tls.clone()).map_err(|error| failed(&error))?,
        None if is_tls => {
            let detail = "an https URL needs the certificate of etcd's authority".to_owned();
            return Err(Error::Endpoint { what: format!("server {server}"), detail });
        }
        _ => endpoint,
    };
    Ok(endpoint.connect_lazy())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn changed_tls_files_make_new_channels() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let identity = EtcdIdentity { certificate: file("crt", "1"), key: file("key", "1") };
        let tls = EtcdTls { authority: file("ca", "1"), identity: Some(identity) };
        let channels = Channels::new(&["http://127.0.0.1:1".to_owned()], Some(&tls)).unwrap();
        assert!(!channels.reload().unwrap());
        for name in ["crt", "key", "ca"] {
            let path = file(name, "2");
            assert!(channels.reload().unwrap() && !channels.reload().unwrap(), "{name}");
            assert!(path.exists());
        }
        std::fs::remove_file(directory.path().join("ca")).unwrap();
        assert!(channels.reload().is_err());
        assert_eq!(channels.all().len(), 1, "the former channels stay");
    }
}
