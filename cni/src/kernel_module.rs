//! Loading of kernel modules that the kernel does not load on its own.

use std::{path::Path, process::Stdio, time::Duration};

use tokio::{process::Command, time::timeout};

/// Maximum time to load a module.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Paths of `modprobe`. `PATH` is not searched: the environment must not decide which program runs as root.
const PATHS: [&str; 4] = ["/usr/sbin/modprobe", "/sbin/modprobe", "/usr/bin/modprobe", "/bin/modprobe"];

/// Loads a module with the `modprobe` of the host.
///
/// # Errors
/// The reason, as a text for the log: no `modprobe`, no such module, or a timeout.
pub(crate) async fn load(name: &'static str) -> Result<(), String> {
    let program = PATHS.iter().find(|place| Path::new(place).exists());
    let mut command = Command::new(program.ok_or_else(|| "the host has no modprobe".to_owned())?);
    command.args(["-q", name]).env_clear();
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
    match timeout(TIMEOUT, command.status()).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(format!("modprobe: {status}")),
        Ok(Err(error)) => Err(format!("cannot run modprobe: {error}")),
        Err(_elapsed) => Err(format!("modprobe did not end within {} s", TIMEOUT.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    #[tokio::test]
    async fn an_unknown_module_is_an_error() {
        assert!(super::load("coracle-no-such-module").await.is_err());
    }
}
