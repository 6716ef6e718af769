//! AdamW as one would write it down, in f64: what every device is tested against.

use super::AdamWConfig;

/// Parameters and moments in f64.
#[derive(Debug, Clone)]
pub struct Reference {
    pub parameters: Vec<f64>,
    m: Vec<f64>,
    v: Vec<f64>,
    step: i32,
}

impl Reference {
    pub fn new(parameters: &[f32]) -> Reference {
        let n = parameters.len();
        let parameters = parameters.iter().map(|x| f64::from(*x)).collect();
        Reference { parameters, m: vec![0.0; n], v: vec![0.0; n], step: 0 }
    }

    pub fn update(&mut self, gradient: &[f32], scale: f64, learning_rate: f64, c: &AdamWConfig) {
        self.step += 1;
        for (i, g) in gradient.iter().enumerate() {
            let g = scale * f64::from(*g);
            self.parameters[i] -= learning_rate * c.weight_decay * self.parameters[i];
            self.m[i] += (1.0 - c.beta1) * (g - self.m[i]);
            self.v[i] = c.beta2 * self.v[i] + (1.0 - c.beta2) * g * g;
            let m = self.m[i] / (1.0 - c.beta1.powi(self.step));
            let v = self.v[i] / (1.0 - c.beta2.powi(self.step));
            self.parameters[i] -= learning_rate * m / (v.sqrt() + c.eps);
        }
    }
}
