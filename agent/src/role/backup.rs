//! `coracle backup` and `coracle restore`: backups of the embedded store.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use coracle_controlplane::{BACKUP_PATH, BackupFile, offline_backup, restore_backup};
use http_body_util::BodyExt as _;
use kube::client::Body;

use super::token::client;
use crate::settings::{AllFlags, ControlPlaneSettings, Flags, LogSettings, PathSettings, Settings};

/// Flags of `coracle backup`.
#[derive(Args)]
pub(crate) struct BackupArguments {
    #[command(flatten)]
    paths: Flags<PathSettings>,
    /// Kubeconfig of a running control plane [default: admin.kubeconfig in the state directory]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// The file to write. It replaces an existing one when it is complete.
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// Flags of `coracle restore`.
#[derive(Args)]
pub(crate) struct RestoreArguments {
    #[command(flatten)]
    paths: Flags<PathSettings>,
    #[command(flatten)]
    plane: Flags<ControlPlaneSettings>,
    /// The file that `coracle backup` wrote
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// Writes a backup: of the running control plane, or of the store of a stopped one.
pub(crate) async fn backup(arguments: BackupArguments, log: Flags<LogSettings>) -> anyhow::Result<()> {
    let BackupArguments { paths, kubeconfig, file } = arguments;
    let settings = Settings::load_for_command(AllFlags { log, paths, ..AllFlags::default() })?;
    let state = &settings.dirs().state;
    let is_local = kubeconfig.is_none();
    let stopped = if is_local { offline_backup(state)? } else { None };
    let mut target = BackupFile::create(&file)?;
    match stopped {
        Some(backup) => {
            for chunk in backup {
                target.write(&chunk.context("cannot read the store")?)?;
            }
        }
        None => {
            let path = kubeconfig.unwrap_or_else(|| state.join("admin.kubeconfig"));
            download(&path, &mut target).await?;
        }
    }
    let summary = target.finish()?;
    super::print(&format!(
        "{} objects up to revision {} are in {}\n",
        summary.entries,
        summary.revision,
        file.display()
    ))
}

async fn download(kubeconfig: &Path, target: &mut BackupFile) -> anyhow::Result<()> {
    let client = client(kubeconfig).await?;
    let request = http::Request::get(BACKUP_PATH).body(Body::empty())?;
    let response = client.send(request).await.context("cannot reach the API server")?;
    let status = response.status();
    let mut body = response.into_body();
    if !status.is_success() {
        let text = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        let reply: serde_json::Value = serde_json::from_slice(&text).unwrap_or_default();
        let message = reply.get("message").and_then(|message| message.as_str()).unwrap_or_default();
        anyhow::bail!("the API server refuses the backup: {status}: {message}");
    }
    while let Some(frame) = body.frame().await {
        let frame = frame.context("the connection to the API server ended during the backup")?;
        if let Some(chunk) = frame.data_ref() {
            target.write(chunk)?;
        }
    }
    Ok(())
}

/// Replaces the store of the stopped control plane by a backup.
pub(crate) fn restore(arguments: RestoreArguments, log: Flags<LogSettings>) -> anyhow::Result<()> {
    let RestoreArguments { paths, plane, file } = arguments;
    let settings = Settings::load_for_command(AllFlags { log, paths, plane, ..AllFlags::default() })?;
    let plane = settings.control_plane();
    anyhow::ensure!(
        plane.etcd.is_none(),
        "the objects are in etcd: restore them with `etcdutl snapshot restore`"
    );
    let restored = restore_backup(
        &plane.dirs.state,
        plane.encryption_key_file.as_deref(),
        plane.encryption.as_ref().map(|file| file.path.as_path()),
        &file,
    )?;
    let replaced = plane.dirs.state.join("store.replaced");
    // If there is no store, the restore replaces nothing.
    let former = match replaced.exists() {
        true => format!("; the former store is {}", replaced.display()),
        false => String::new(),
    };
    super::print(&format!(
        "{} objects of revision {} are restored{former}\n",
        restored.entries, restored.revision
    ))
}
