"""Temporary table."""
from __future__ import annotations
import itertools
from collections import Counter
import numpy as np
from search_spaces.config import TrialConfig, knobs
from search_spaces.legality import check
def validate_choices(search): 
    for k,v in search.items():
        if k not in knobs(): raise ValueError(f"unknown knob {k}")
class SearchSpace:
    def __init__(self, workload, choices):
        self.choices={k: tuple(v) if isinstance(v,(list,tuple)) else (v,) for k,v in choices.items()}
        self.refused=Counter(); self._c=[]; self._rows={}; idx=[]
        for ix in itertools.product(*[range(len(v)) for v in self.choices.values()]):
            c=self.config_at(dict(zip(self.choices,ix)))
            if c in self._rows: continue
            v=check(workload,c)
            if v: self.refused.update(x.name for x in v[:1]); continue
            self._rows[c]=len(self._c); self._c.append(c); idx.append(ix)
        self.index_matrix=np.array(idx).reshape(len(idx),len(self.choices))
    def normalise(self,c):
        u={}
        if c.tensor_model_parallel_size==1: u["sequence_parallel"]=False
        if c.recompute_granularity=="full": u.update(recompute_method="uniform",recompute_num_layers=1)
        return c.model_copy(update=u)
    def config_at(self,ix): return self.normalise(TrialConfig(**{k:self.choices[k][i] for k,i in ix.items()}))
    def row(self,c): return self._rows.get(c)
    def __len__(self): return len(self._c)
    def __iter__(self): return iter(self._c)
