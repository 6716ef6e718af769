//! Weights and optimiser state on disk.
//!
//! A checkpoint is a folder:
//!
//! | file | content |
//! |---|---|
//! | `weights.safetensors` | trainable tensors (all, or the LoRA adapters) under Hugging Face / PEFT names, f32 |
//! | `optimizer.bin` | [`AdamW::to_bytes`]: moments, step count, checksum |
//! | `manifest.json` | format version, policy version, hashes of both |
//! | `B3SUMS` | BLAKE3 of the other files, as `b3sum --check` reads it; written last |
//!
//! Written beside its place under a temporary name, every file and the folder fsynced, then renamed, then
//! the parent folder fsynced: a checkpoint is complete or absent. Saving and loading changes no bit, so a
//! run continued from a checkpoint equals the uninterrupted one.

use super::adamw::AdamW;
use super::error::LearnerError;
use super::policy::lock;
use super::step::Learner;
use candle_core::{Device, Tensor};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

/// Version of the folder's format.
const FORMAT_VERSION: u32 = 1;
const WEIGHTS: &str = "weights.safetensors";
const OPTIMIZER: &str = "optimizer.bin";
const MANIFEST: &str = "manifest.json";
const SUMS: &str = "B3SUMS";

/// What a checkpoint holds.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct CheckpointInfo {
    /// Format of the folder.
    pub format: u32,
    /// Policy version.
    pub version: u32,
    /// Updates taken by the optimiser.
    pub optimizer_step: u64,
    /// Updates skipped in a row before it.
    pub skips_in_row: u32,
    /// Trainable values.
    pub parameters: u64,
    /// BLAKE3 of the trainable weights, hex.
    pub weights_hash: String,
    /// BLAKE3 of the optimiser state, hex.
    pub optimizer_hash: String,
}

pub use crate::model::weights_hash;

/// The manifest of a checkpoint, without loading it.
pub fn info(folder: &Path) -> Result<CheckpointInfo, LearnerError> {
    let path = folder.join(MANIFEST);
    let text = fs::read_to_string(&path).map_err(|e| LearnerError::checkpoint(&path, e))?;
    let info: CheckpointInfo = serde_json::from_str(&text)
        .map_err(|e| LearnerError::checkpoint(&path, format!("{e}; the file is damaged, use an older checkpoint")))?;
    if info.format != FORMAT_VERSION {
        let fault = format!("format {}, this program reads {FORMAT_VERSION}", info.format);
        return Err(LearnerError::checkpoint(&path, fault));
    }
    Ok(info)
}

/// Whether a checkpoint holds the files it was written with, byte for byte; needs no model.
///
/// # Errors
/// [`LearnerError::Checkpoint`] naming what is missing, differs, or does not belong.
pub fn check(folder: &Path) -> Result<(), LearnerError> {
    let bad = |fault: String| Err(LearnerError::checkpoint(folder, fault));
    let failed = |e: std::io::Error| LearnerError::checkpoint(folder, e);
    let recorded = fs::read(folder.join(SUMS)).map_err(|e| LearnerError::checkpoint(&folder.join(SUMS), e))?;
    let mut names = BTreeSet::from([SUMS.to_string()]);
    for entry in fs::read_dir(folder).map_err(failed)? {
        names.insert(entry.map_err(failed)?.file_name().to_string_lossy().into_owned());
    }
    names.remove(SUMS);
    let mut sums = String::new();
    for name in names {
        let bytes = fs::read(folder.join(&name)).map_err(failed)?;
        let line = format!("{}  {name}\n", blake3::hash(&bytes).to_hex());
        if !recorded.split(|b| *b == b'\n').any(|l| l == line.trim_end().as_bytes()) {
            return bad(format!("{name} does not have the hash that {SUMS} says"));
        }
        sums += &line;
    }
    match sums.as_bytes() == recorded {
        true => Ok(()),
        false => bad(format!("{SUMS} names other files than there are")),
    }
}

impl Learner {
    /// Writes a checkpoint to `folder`, replacing an older one there.
    pub fn save(&self, folder: &Path) -> Result<CheckpointInfo, LearnerError> {
        let tensors = lock(self.compute()).tensors();
        let bytes: Vec<u8> = self.with_trainable(|w| w.iter().flat_map(|x| x.to_le_bytes()).collect())?;
        let views = tensors
            .iter()
            .map(|t| {
                let range = t.range();
                TensorView::new(Dtype::F32, t.shape.clone(), &bytes[4 * range.start..4 * range.end])
                    .map(|view| (t.name.as_str(), view))
            })
            .collect::<Result<Vec<_>, _>>()
            .map_err(|e| LearnerError::checkpoint(folder, e))?;
        let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
        let weights = safetensors::serialize(views, Some(metadata)).map_err(|e| LearnerError::checkpoint(folder, e))?;
        let info = CheckpointInfo {
            format: FORMAT_VERSION,
            version: self.version,
            optimizer_step: self.optimizer.step_count(),
            skips_in_row: self.skips_in_row,
            parameters: self.optimizer.len() as u64,
            weights_hash: self.weights_hash()?,
            optimizer_hash: self.optimizer.hash(),
        };
        let manifest = serde_json::to_vec_pretty(&info).map_err(|e| LearnerError::checkpoint(folder, e))?;
        write(folder, &[(WEIGHTS, &weights), (OPTIMIZER, &self.optimizer.to_bytes()), (MANIFEST, &manifest)])?;
        Ok(info)
    }

    /// Takes over weights, optimiser state and version of a checkpoint of the same model. On any error the
    /// learner is unchanged.
    pub fn load(&mut self, folder: &Path) -> Result<CheckpointInfo, LearnerError> {
        let info = info(folder)?;
        let path = folder.join(OPTIMIZER);
        let bytes = fs::read(&path).map_err(|e| LearnerError::checkpoint(&path, e))?;
        let optimizer = AdamW::from_bytes(&bytes).map_err(|e| LearnerError::checkpoint(&path, e))?;
        if optimizer.hash() != info.optimizer_hash || optimizer.len() != self.optimizer.len() {
            let fault = format!("is not the state that {MANIFEST} names, or is of another model");
            return Err(LearnerError::checkpoint(&path, fault));
        }
        let weights = self.read_weights(folder)?;
        if weights_hash(&weights) != info.weights_hash {
            let fault = format!("weights do not have the hash in {MANIFEST}; the checkpoint is damaged");
            return Err(LearnerError::checkpoint(&folder.join(WEIGHTS), fault));
        }
        let len = weights.len();
        self.weights.set(&Tensor::from_vec(weights, len, &Device::Cpu)?)?;
        self.optimizer = optimizer;
        self.version = info.version;
        self.skips_in_row = info.skips_in_row;
        Ok(info)
    }

    fn read_weights(&self, folder: &Path) -> Result<Vec<f32>, LearnerError> {
        let path = folder.join(WEIGHTS);
        let bytes = fs::read(&path).map_err(|e| LearnerError::checkpoint(&path, e))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|e| LearnerError::checkpoint(&path, e))?;
        let mut weights = vec![0f32; self.optimizer.len()];
        for spec in lock(self.compute()).tensors() {
            let tensor = file.tensor(&spec.name).map_err(|e| LearnerError::checkpoint(&path, e))?;
            if tensor.dtype() != Dtype::F32 || tensor.shape() != spec.shape {
                let fault = format!(
                    "{} is {:?} {:?}, the model has F32 {:?}",
                    spec.name,
                    tensor.dtype(),
                    tensor.shape(),
                    spec.shape
                );
                return Err(LearnerError::checkpoint(&path, fault));
            }
            let values = tensor.data().chunks_exact(4).map(|c| f32::from_le_bytes(std::array::from_fn(|i| c[i])));
            weights[spec.range()].iter_mut().zip(values).for_each(|(w, v)| *w = v);
        }
        Ok(weights)
    }
}

/// Makes `folder` hold exactly these files and their hashes, durably. A crash leaves it complete (old or new) or absent.
///
/// # Errors
/// [`LearnerError::Checkpoint`].
pub fn write(folder: &Path, files: &[(&str, &[u8])]) -> Result<(), LearnerError> {
    let mut sums: Vec<(&str, String)> =
        files.iter().map(|(name, bytes)| (*name, format!("{}  {name}\n", blake3::hash(bytes).to_hex()))).collect();
    sums.sort();
    let sums: String = sums.into_iter().map(|(_, line)| line).collect();
    replace_folder(folder, &[files, &[(SUMS, sums.as_bytes())]].concat())
}

fn replace_folder(folder: &Path, files: &[(&str, &[u8])]) -> Result<(), LearnerError> {
    let fault = |path: &Path| {
        let path = path.to_path_buf();
        move |e: std::io::Error| LearnerError::checkpoint(&path, e)
    };
    let (Some(parent), Some(name)) = (folder.parent(), folder.file_name()) else {
        return Err(LearnerError::checkpoint(folder, "is no folder name"));
    };
    let beside = |mark: &str| parent.join(format!(".{}.{mark}", name.to_string_lossy()));
    let (fresh, stale) = (beside("new"), beside("old"));
    fs::create_dir_all(parent).map_err(fault(parent))?;
    for leftover in [&fresh, &stale] {
        if leftover.exists() {
            fs::remove_dir_all(leftover).map_err(fault(leftover))?;
        }
    }
    fs::create_dir(&fresh).map_err(fault(&fresh))?;
    for (name, bytes) in files {
        let path = fresh.join(name);
        let mut file = File::create(&path).map_err(fault(&path))?;
        file.write_all(bytes).and_then(|()| file.sync_all()).map_err(fault(&path))?;
    }
    let sync = |path: &Path| File::open(path).and_then(|f| f.sync_all()).map_err(fault(path));
    sync(&fresh)?;
    if folder.exists() {
        fs::rename(folder, &stale).map_err(fault(folder))?;
    }
    fs::rename(&fresh, folder).map_err(fault(folder))?;
    sync(parent)?;
    if stale.exists() {
        fs::remove_dir_all(&stale).map_err(fault(&stale))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Reward;
    use crate::learner::batch::{GroupRollouts, group_rollouts};
    use crate::learner::config::LearnerConfig;
    use crate::learner::fake::{Bigram, rollout};
    use crate::learner::step::StepOutcome;

    const V: usize = 10;

    fn learner(seed: u64) -> Learner {
        let (bigram, weights) = Bigram::new(V, seed);
        let config = LearnerConfig { learning_rate: 0.01, ..LearnerConfig::default() };
        Learner::new(Box::new(bigram), weights, config).unwrap()
    }

    fn groups(step: u32) -> Vec<GroupRollouts> {
        group_rollouts((0..4).map(|k| rollout(step, "t", k, V, Reward::Scored(f64::from(k % 2)))).collect())
    }

    fn steps(l: &mut Learner, range: std::ops::Range<u32>) -> Vec<StepOutcome> {
        range.map(|s| l.step(s, 0.8, &groups(s)).unwrap()).collect()
    }

    #[test]
    fn saved_loaded_and_continued_equals_uninterrupted_bit_for_bit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoints/v3");
        let mut straight = learner(1);
        let mut wanted = steps(&mut straight, 1..4);
        let saved = straight.save(&path).unwrap();
        wanted.extend(steps(&mut straight, 4..8));

        let mut resumed = learner(1);
        assert_eq!(resumed.load(&path).unwrap(), saved);
        assert_eq!((saved.version, saved.optimizer_step, resumed.version()), (3, 3, 3));
        let got = steps(&mut resumed, 4..8);
        assert_eq!(got, wanted[3..]);
        assert_eq!(resumed.trainable().unwrap(), straight.trainable().unwrap());
        assert_eq!(resumed.optimizer_hash(), straight.optimizer_hash());

        // Saving again replaces; nothing temporary stays.
        straight.save(&path).unwrap();
        assert_eq!(info(&path).unwrap().version, 7);
        let names: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["v3"]);
    }

    #[test]
    fn the_file_is_ordinary_safetensors() {
        let folder = tempfile::tempdir().unwrap();
        let l = learner(2);
        l.save(&folder.path().join("c")).unwrap();
        let tensors = candle_core::safetensors::load(folder.path().join("c").join(WEIGHTS), &Device::Cpu).unwrap();
        let weights = l.trainable().unwrap();
        assert_eq!(tensors["table.low"].dims(), [5, 10]);
        assert_eq!(tensors["table.high"].flatten_all().unwrap().to_vec1::<f32>().unwrap(), weights[50..]);
        assert_eq!(tensors.len(), 2);
    }

    #[test]
    fn every_damaged_byte_is_found_and_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c");
        let mut l = learner(3);
        steps(&mut l, 1..3);
        l.save(&path).unwrap();
        let mut other = learner(4);
        let before = (other.weights_hash().unwrap(), other.optimizer_hash());
        for name in [WEIGHTS, OPTIMIZER] {
            let file = path.join(name);
            let good = fs::read(&file).unwrap();
            for at in (0..good.len()).step_by(7).chain([good.len() - 1]) {
                let mut bad = good.clone();
                bad[at] ^= 0x10;
                fs::write(&file, &bad).unwrap();
                // A flipped character in the names of safetensors' free metadata is no damage to weights.
                if let Err(error) = other.load(&path) {
                    assert!(
                        matches!(error, LearnerError::Checkpoint { .. } | LearnerError::OptimizerState(_)),
                        "{error}"
                    );
                    assert_eq!((other.weights_hash().unwrap(), other.optimizer_hash()), before);
                } else {
                    assert_eq!(other.weights_hash().unwrap(), l.weights_hash().unwrap());
                    other = learner(4);
                }
            }
            fs::write(&file, &good[..good.len() / 2]).unwrap();
            assert!(other.load(&path).is_err());
            fs::write(&file, &good).unwrap();
        }
        fs::remove_file(path.join(MANIFEST)).unwrap();
        let error = other.load(&path).unwrap_err();
        assert!(error.to_string().contains(MANIFEST), "{error}");
        assert_eq!((other.weights_hash().unwrap(), other.optimizer_hash()), before);
    }
}
